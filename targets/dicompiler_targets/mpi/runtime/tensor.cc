#include "tensor.hpp"

#include <cstring>

namespace dicompiler {

namespace {

using Loops = std::vector<StridedCopy::Loop>;

// Returns the end of the copied bytes in the source or in the target, selected by `stride`. `begin` is their start.
std::size_t end_offset(const StridedCopy& copy, std::size_t begin, std::size_t StridedCopy::Loop::*stride) {
    for (const auto& loop : copy.loops) begin += (loop.count - 1) * loop.*stride;
    return begin + copy.run_bytes;
}

// Executes the innermost loop for a block size that is known at compile time, which makes the copy faster.
template <std::size_t RunBytes>
void copy_runs(char* target, const char* source, const StridedCopy::Loop& loop) {
    for (std::size_t i = 0; i < loop.count; ++i, target += loop.target_stride, source += loop.source_stride) {
        std::memcpy(target, source, RunBytes);
    }
}

void copy_runs(char* target, const char* source, std::size_t run_bytes, const StridedCopy::Loop& loop) {
    switch (run_bytes) {
        case 1: return copy_runs<1>(target, source, loop);
        case 2: return copy_runs<2>(target, source, loop);
        case 4: return copy_runs<4>(target, source, loop);
        case 8: return copy_runs<8>(target, source, loop);
        default: break;
    }
    for (std::size_t i = 0; i < loop.count; ++i, target += loop.target_stride, source += loop.source_stride) {
        std::memcpy(target, source, run_bytes);
    }
}

void copy_loops(char* target, const char* source, std::size_t run_bytes, Loops::const_iterator loop,
                Loops::const_iterator last) {
    if (loop == last) return copy_runs(target, source, run_bytes, *loop);
    for (std::size_t i = 0; i < loop->count; ++i, target += loop->target_stride, source += loop->source_stride) {
        copy_loops(target, source, run_bytes, loop + 1, last);
    }
}

}  // namespace

void copy(const StridedCopy& copy, const Tensor& source, const Tensor& target) {
    if (end_offset(copy, copy.source_offset, &StridedCopy::Loop::source_stride) > source.bytes() ||
        end_offset(copy, copy.target_offset, &StridedCopy::Loop::target_stride) > target.bytes()) {
        throw Error("tensor '" + source.name + "' with the shape " + to_string(source.shape) +
                    " does not fit the copy into '" + target.name + "': compile the model again");
    }
    auto* to = static_cast<char*>(target.data) + copy.target_offset;
    const auto* from = static_cast<const char*>(source.data) + copy.source_offset;
    if (copy.loops.empty()) {
        std::memcpy(to, from, copy.run_bytes);
    } else {
        copy_loops(to, from, copy.run_bytes, copy.loops.begin(), copy.loops.end() - 1);
    }
}

std::size_t size_of(Type type) {
    switch (type) {
        case Type::other: return 0;
        case Type::int64: case Type::uint64: case Type::float64: return 8;
        case Type::float32: case Type::int32: case Type::uint32: return 4;
        case Type::float16: case Type::bfloat16: case Type::int16: case Type::uint16: return 2;
        default: return 1;
    }
}

std::string numpy_name(Type type) {
    switch (type) {
        case Type::float64: return "<f8";
        case Type::float32: return "<f4";
        case Type::float16: return "<f2";
        case Type::int64: return "<i8";
        case Type::int32: return "<i4";
        case Type::int16: return "<i2";
        case Type::int8: return "|i1";
        case Type::uint64: return "<u8";
        case Type::uint32: return "<u4";
        case Type::uint16: return "<u2";
        case Type::uint8: return "|u1";
        case Type::boolean: return "|b1";
        default: return "|V" + std::to_string(size_of(type));
    }
}

std::size_t count_elements(const Shape& shape) {
    std::size_t count = 1;
    for (const auto extent : shape) count *= static_cast<std::size_t>(extent);
    return count;
}

std::string to_string(const Shape& shape) {
    std::string text;
    for (const auto extent : shape) text += (text.empty() ? "" : ", ") + std::to_string(extent);
    return "(" + text + (shape.size() == 1 ? ",)" : ")");
}

}  // namespace dicompiler
