#include "tensor.hpp"

namespace dicompiler {

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
