#include "npy.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>

namespace dicompiler {
namespace {

const std::string MAGIC = "\x93NUMPY";

// A little-endian number of `size` bytes at `at`.
std::uint64_t number(const std::string& bytes, std::size_t at, std::size_t size, const std::string& place) {
    if (at > bytes.size() || size > bytes.size() - at) throw Error(place + ": the file is cut short");
    std::uint64_t found = 0;
    for (std::size_t i = size; i-- > 0;) found = found << 8U | static_cast<unsigned char>(bytes[at + i]);
    return found;
}

std::string part(const std::string& bytes, std::size_t at, std::size_t size, const std::string& place) {
    if (at > bytes.size() || size > bytes.size() - at) throw Error(place + ": the file is cut short");
    return bytes.substr(at, size);
}

// What stands behind `key` in the header, which is the text of a Python dictionary, up to `end`.
std::string entry(const std::string& header, const std::string& key, char end, const std::string& place) {
    const auto found = header.find("'" + key + "':");
    const auto start = found == std::string::npos ? found : header.find_first_not_of(' ', found + key.size() + 3);
    const auto stop = start == std::string::npos ? start : header.find(end, start + 1);
    if (stop == std::string::npos) throw Error(place + ": it holds no plain array");
    return header.substr(start, stop - start);
}

// "(1, 3" as numbers.
Shape parse_shape(const std::string& digits, const std::string& place) {
    Shape shape;
    for (std::size_t at = digits.find_first_of("0123456789"); at != std::string::npos;) {
        const auto stop = std::min(digits.find_first_not_of("0123456789", at), digits.size());
        if (stop - at > 15) throw Error(place + ": its shape is too large");
        shape.push_back(std::stoll(digits.substr(at, stop - at)));
        at = digits.find_first_of("0123456789", stop);
    }
    return shape;
}

std::size_t item_size(const std::string& type, const std::string& place) {
    const auto digits = type.size() > 2 ? type.substr(2) : "";
    if (digits.empty() || digits.size() > 3 || digits.find_first_not_of("0123456789") != std::string::npos ||
        std::string("OSU").find(type[1]) != std::string::npos) {
        throw Error(place + ": elements of type " + type + " are no numbers");
    }
    if (type[0] == '>') throw Error(place + ": it is big-endian: write it with astype(dtype.newbyteorder('<'))");
    return static_cast<std::size_t>(std::stoul(digits));
}

// The array in the text of an .npy file.
Array parse_npy(const std::string& bytes, const std::string& place) {
    if (bytes.compare(0, MAGIC.size(), MAGIC) != 0) throw Error(place + ": not a file of numpy's (.npy)");
    const std::size_t wide = number(bytes, 6, 1, place) > 1 ? 4 : 2;
    const auto length = static_cast<std::size_t>(number(bytes, 8, wide, place));
    const auto header = part(bytes, 8 + wide, length, place);
    Array array;
    // The type is a text in quotes; of arrays with fields it is a list.
    array.type = entry(header, "descr", ',', place).substr(1);
    array.type = array.type.substr(0, array.type.find('\''));
    array.shape = parse_shape(entry(header, "shape", ')', place), place);
    if (entry(header, "fortran_order", ',', place) != "False" && array.shape.size() > 1) {
        throw Error(place + ": it is in Fortran order: write it with numpy.ascontiguousarray");
    }
    array.bytes = item_size(array.type, place) * count(array.shape);
    const auto start = 8 + wide + length;
    if (bytes.size() - start < array.bytes) throw Error(place + ": the file is cut short");
    array.data = allocate(array.bytes);
    std::memcpy(array.data.get(), bytes.data() + start, array.bytes);
    return array;
}

// A member of a zip archive, as its directory describes it.
struct Member {
    std::string name;
    std::uint64_t method, packed, size, offset;
};

// Sizes over 4 GiB stand in the extra field of zip64, in this order.
void widen(Member& member, const std::string& extra, const std::string& place) {
    for (std::size_t at = 0; at + 4 <= extra.size();) {
        const auto kind = number(extra, at, 2, place);
        const auto length = static_cast<std::size_t>(number(extra, at + 2, 2, place));
        if (kind == 1) {
            std::size_t value = at + 4;
            for (auto* field : {&member.size, &member.packed, &member.offset}) {
                if (*field != 0xffffffffU) continue;
                *field = number(extra, value, 8, place);
                value += 8;
            }
        }
        at += 4 + length;
    }
}

std::vector<Member> directory(const std::string& bytes, const std::string& place) {
    const auto end = bytes.rfind("PK\x05\x06");
    if (end == std::string::npos) throw Error(place + ": not an .npz file: write it with numpy.savez");
    auto entries = number(bytes, end + 10, 2, place);
    auto at = static_cast<std::size_t>(number(bytes, end + 16, 4, place));
    const auto wide = bytes.rfind("PK\x06\x06", end);
    if (at == 0xffffffffU && wide != std::string::npos) {
        entries = number(bytes, wide + 32, 8, place);
        at = static_cast<std::size_t>(number(bytes, wide + 48, 8, place));
    }
    std::vector<Member> members;
    for (std::uint64_t i = 0; i < entries; ++i) {
        const auto name = static_cast<std::size_t>(number(bytes, at + 28, 2, place));
        const auto extra = static_cast<std::size_t>(number(bytes, at + 30, 2, place));
        const auto comment = static_cast<std::size_t>(number(bytes, at + 32, 2, place));
        Member member{part(bytes, at + 46, name, place), number(bytes, at + 10, 2, place),
                      number(bytes, at + 20, 4, place), number(bytes, at + 24, 4, place),
                      number(bytes, at + 42, 4, place)};
        widen(member, part(bytes, at + 46 + name, extra, place), place);
        members.push_back(member);
        at += 46 + name + extra + comment;
    }
    return members;
}

}  // namespace

std::shared_ptr<void> allocate(std::size_t bytes) {
    const auto rounded = (bytes / ALIGN + 1) * ALIGN;
    void* found = std::aligned_alloc(ALIGN, rounded);
    if (found == nullptr) throw Error("no memory is left for " + std::to_string(bytes) + " bytes");
    return {found, std::free};
}

std::string read_file(const std::string& path) {
    std::ifstream file(path, std::ios::binary | std::ios::ate);
    const auto size = file ? static_cast<std::streamoff>(file.tellg()) : -1;
    if (size < 0) throw Error(path + ": cannot be read: " + std::strerror(errno));
    std::string bytes(static_cast<std::size_t>(size), '\0');
    file.seekg(0);
    if (!file.read(&bytes[0], size)) throw Error(path + ": cannot be read: " + std::strerror(errno));
    return bytes;
}

Array read_npy(const std::string& path) { return parse_npy(read_file(path), path); }

std::map<std::string, Array> read_npz(const std::string& path) {
    const auto bytes = read_file(path);
    std::map<std::string, Array> found;
    for (const auto& member : directory(bytes, path)) {
        const auto place = path + ": '" + member.name + "'";
        if (member.method != 0) throw Error(place + " is compressed: write the file with numpy.savez");
        const auto at = static_cast<std::size_t>(member.offset);
        const auto start = at + 30 + static_cast<std::size_t>(number(bytes, at + 26, 2, place)) +
                           static_cast<std::size_t>(number(bytes, at + 28, 2, place));
        const auto stem = member.name.size() > 4 ? member.name.size() - 4 : 0;
        if (member.name.substr(stem) != ".npy") throw Error(place + " is no array: write the file with numpy.savez");
        found[member.name.substr(0, stem)] =
            parse_npy(part(bytes, start, static_cast<std::size_t>(member.size), place), place);
    }
    return found;
}

void write_npy(const std::string& path, const Tensor& tensor) {
    std::string header = "{'descr': '" + numpy_name(tensor.type) + "', 'fortran_order': False, 'shape': " +
                         text(tensor.shape) + ", }";
    // The data starts at a multiple of 64; ten bytes stand before the header.
    header += std::string(ALIGN - 1 - (10 + header.size()) % ALIGN, ' ') + "\n";
    if (header.size() > 0xffff) throw Error(path + ": its shape has too many axes");
    const std::string size{static_cast<char>(header.size() & 0xffU), static_cast<char>(header.size() >> 8U)};
    std::ofstream file(path, std::ios::binary);
    file << MAGIC << std::string{'\x01', '\x00'} << size << header;
    file.write(static_cast<const char*>(tensor.data), static_cast<std::streamsize>(tensor.bytes()));
    file.close();
    if (!file) throw Error(path + ": cannot be written: " + std::strerror(errno));
}

}  // namespace dicompiler
