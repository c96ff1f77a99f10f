// Element types, tensors, strided copies, and the error that ends a rank (an MPI process of the program).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace dicompiler {

// The reason why a rank cannot continue, in one line. `peer` is the rank that has probably caused it, or -1.
struct Error : std::runtime_error {
    explicit Error(const std::string& message, int peer_rank = -1) : std::runtime_error(message), peer(peer_rank) {}
    int peer;
};

// Element types with their numbers in onnx.TensorProto.DataType. `other` is for values that are not tensors of numbers,
// and for tensors of unknown type.
enum class Type : int {
    other = 0, float32 = 1, uint8 = 2, int8 = 3, uint16 = 4, int16 = 5, int32 = 6, int64 = 7, boolean = 9,
    float16 = 10, float64 = 11, uint32 = 12, uint64 = 13, bfloat16 = 16, float8e4m3fn = 17, float8e4m3fnuz = 18,
    float8e5m2 = 19, float8e5m2fnuz = 20,
};

// Returns the number of bytes of an element; 0 for `other`.
std::size_t size_of(Type type);
// Returns numpy's name of the type, such as "<f4". Types without a numpy type become void types of the same size.
std::string numpy_name(Type type);

using Shape = std::vector<std::int64_t>;

// Returns the shape as numpy prints it: "(1, 3, 224, 224)".
std::string to_string(const Shape& shape);
std::size_t count_elements(const Shape& shape);

// A tensor of one frame in flight. If `fixed` is true, type and shape are known before the run, and `data` points into
// a preallocated buffer. Otherwise, type, shape and data are set for each frame, and `owner` keeps the memory alive.
struct Tensor {
    std::string name;
    Type type = Type::other;
    Shape shape;
    bool fixed = false;
    void* data = nullptr;
    std::shared_ptr<void> owner;
    // True if `owner` is a value of the engine, which is possibly not a tensor.
    bool opaque = false;

    std::size_t bytes() const { return size_of(type) * count_elements(shape); }
};

// A copy of blocks of `run_bytes` contiguous bytes from one tensor to another. The first block begins at the offsets.
// It is repeated by nested loops, the outermost loop first, with strides in bytes.
struct StridedCopy {
    struct Loop { std::size_t count, source_stride, target_stride; };
    std::size_t source_offset, target_offset, run_bytes;
    std::vector<Loop> loops;
};

// Makes the copy. Throws Error if it does not lie within both tensors.
void copy(const StridedCopy& copy, const Tensor& source, const Tensor& target);

}  // namespace dicompiler
