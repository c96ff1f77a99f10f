// What every part of the program shares: element types, tensors, and the error that ends a rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace dicompiler {

// Why a rank cannot go on, in one line. `peer`: the rank that seems to be the cause, -1: none.
struct Error : std::runtime_error {
    explicit Error(const std::string& message, int peer_rank = -1) : std::runtime_error(message), peer(peer_rank) {}
    int peer;
};

// Element types by their number in ONNX. `other`: what is no plain tensor, or a tensor of unknown type.
enum class Type : int {
    other = 0, float32 = 1, uint8 = 2, int8 = 3, uint16 = 4, int16 = 5, int32 = 6, int64 = 7, boolean = 9,
    float16 = 10, float64 = 11, uint32 = 12, uint64 = 13, bfloat16 = 16, float8e4m3fn = 17, float8e4m3fnuz = 18,
    float8e5m2 = 19, float8e5m2fnuz = 20,
};

// Bytes of one element; 0 for `other`.
std::size_t size_of(Type type);
// How numpy's files call it: "<f4"; types that numpy lacks are void of their size.
std::string numpy_name(Type type);

using Shape = std::vector<std::int64_t>;

// "(1, 3, 224, 224)", as numpy writes it.
std::string text(const Shape& shape);
std::size_t count(const Shape& shape);

// A tensor's place in memory. `fixed`: type and shape are known before the run and `data` is a buffer of ours.
// Otherwise the frame brings them, and `owner` keeps the memory alive (the engine's own value, or an array).
struct Tensor {
    std::string name;
    Type type = Type::other;
    Shape shape;
    bool fixed = false;
    void* data = nullptr;
    std::shared_ptr<void> owner;
    // What `owner` is where it is the engine's own value, which may hold more than a plain tensor.
    bool opaque = false;

    std::size_t bytes() const { return size_of(type) * count(shape); }
};

// A box of one tensor as bytes that go to its place in another: `run` in one piece, from `start` on there and `to` on
// here, again and again in loops, the outermost first: how often, and the bytes from one to the next in either.
struct Box {
    struct Loop { std::size_t times, step, further; };
    std::size_t start, to, run;
    std::vector<Loop> loops;
};

// Throws Error where the box does not lie within both.
void copy(const Box& box, const Tensor& source, const Tensor& target);

}  // namespace dicompiler
