#include "tensor.hpp"

#include <cstring>

namespace dicompiler {

namespace {

using Loops = std::vector<Box::Loop>;

// The first byte behind a box, on the side of that step.
std::size_t behind(const Box& box, std::size_t begin, std::size_t Box::Loop::*step) {
    for (const auto& loop : box.loops) begin += (loop.times - 1) * loop.*step;
    return begin + box.run;
}

// The innermost loop, with a size that the compiler knows.
template <std::size_t Run>
void copy_runs(char* to, const char* from, const Box::Loop& loop) {
    for (std::size_t i = 0; i < loop.times; ++i, to += loop.further, from += loop.step) std::memcpy(to, from, Run);
}

void copy_runs(char* to, const char* from, std::size_t run, const Box::Loop& loop) {
    switch (run) {
        case 1: return copy_runs<1>(to, from, loop);
        case 2: return copy_runs<2>(to, from, loop);
        case 4: return copy_runs<4>(to, from, loop);
        case 8: return copy_runs<8>(to, from, loop);
        default: break;
    }
    for (std::size_t i = 0; i < loop.times; ++i, to += loop.further, from += loop.step) std::memcpy(to, from, run);
}

void copy_loops(char* to, const char* from, std::size_t run, Loops::const_iterator loop, Loops::const_iterator last) {
    if (loop == last) return copy_runs(to, from, run, *loop);
    for (std::size_t i = 0; i < loop->times; ++i, to += loop->further, from += loop->step) {
        copy_loops(to, from, run, loop + 1, last);
    }
}

}  // namespace

void copy(const Box& box, const Tensor& source, const Tensor& target) {
    if (behind(box, box.start, &Box::Loop::step) > source.bytes() ||
        behind(box, box.to, &Box::Loop::further) > target.bytes()) {
        throw Error("tensor '" + source.name + "' with the shape " + text(source.shape) + " is no source of '" +
                    target.name + "': compile again");
    }
    auto* to = static_cast<char*>(target.data) + box.to;
    const auto* from = static_cast<const char*>(source.data) + box.start;
    if (box.loops.empty()) {
        std::memcpy(to, from, box.run);
    } else {
        copy_loops(to, from, box.run, box.loops.begin(), box.loops.end() - 1);
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

std::size_t count(const Shape& shape) {
    std::size_t found = 1;
    for (const auto extent : shape) found *= static_cast<std::size_t>(extent);
    return found;
}

std::string text(const Shape& shape) {
    std::string found;
    for (const auto extent : shape) found += (found.empty() ? "" : ", ") + std::to_string(extent);
    return "(" + found + (shape.size() == 1 ? ",)" : ")");
}

}  // namespace dicompiler
