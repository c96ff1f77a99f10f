#include "npy.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>

namespace dicompiler {
namespace {

const std::string MAGIC = "\x93NUMPY";

// In all functions, `place` is the name of the file (and of the member of the archive) for error messages.

std::string read_part(const std::string& bytes, std::size_t offset, std::size_t size, const std::string& place) {
    if (offset > bytes.size() || size > bytes.size() - offset) throw Error(place + ": the file is cut short");
    return bytes.substr(offset, size);
}

// Reads a little-endian integer of `size` bytes at `offset`.
std::uint64_t read_integer(const std::string& bytes, std::size_t offset, std::size_t size, const std::string& place) {
    const auto digits = read_part(bytes, offset, size, place);
    std::uint64_t value = 0;
    for (std::size_t i = size; i-- > 0;) value = value << 8U | static_cast<unsigned char>(digits[i]);
    return value;
}

// Returns the value of `key` up to the character `end` in the header, which is the text of a Python dictionary.
std::string find_entry(const std::string& header, const std::string& key, char end, const std::string& place) {
    const auto found = header.find("'" + key + "':");
    const auto start = found == std::string::npos ? found : header.find_first_not_of(' ', found + key.size() + 3);
    const auto stop = start == std::string::npos ? start : header.find(end, start + 1);
    if (stop == std::string::npos) throw Error(place + ": it is not a plain numpy array");
    return header.substr(start, stop - start);
}

// Parses the numbers of a shape, such as "(1, 3".
Shape parse_shape(const std::string& text, const std::string& place) {
    Shape shape;
    for (std::size_t start = text.find_first_of("0123456789"); start != std::string::npos;) {
        const auto stop = std::min(text.find_first_not_of("0123456789", start), text.size());
        if (stop - start > 15) throw Error(place + ": its shape is too large");
        shape.push_back(std::stoll(text.substr(start, stop - start)));
        start = text.find_first_of("0123456789", stop);
    }
    return shape;
}

std::size_t get_item_size(const std::string& type, const std::string& place) {
    const auto digits = type.size() > 2 ? type.substr(2) : "";
    if (digits.empty() || digits.size() > 3 || digits.find_first_not_of("0123456789") != std::string::npos ||
        std::string("OSU").find(type[1]) != std::string::npos) {
        throw Error(place + ": elements of type " + type + " are not numbers");
    }
    if (type[0] == '>') throw Error(place + ": it is big-endian: write it with astype(dtype.newbyteorder('<'))");
    return static_cast<std::size_t>(std::stoul(digits));
}

Array parse_npy(const std::string& bytes, const std::string& place) {
    if (bytes.compare(0, MAGIC.size(), MAGIC) != 0) throw Error(place + ": not a numpy file (.npy)");
    const std::size_t length_bytes = read_integer(bytes, 6, 1, place) > 1 ? 4 : 2;
    const auto length = static_cast<std::size_t>(read_integer(bytes, 8, length_bytes, place));
    const auto header = read_part(bytes, 8 + length_bytes, length, place);
    Array array;
    // For arrays with fields, the type is a list instead of a string in quotes, and get_item_size() rejects it.
    array.type = find_entry(header, "descr", ',', place).substr(1);
    array.type = array.type.substr(0, array.type.find('\''));
    array.shape = parse_shape(find_entry(header, "shape", ')', place), place);
    if (find_entry(header, "fortran_order", ',', place) != "False" && array.shape.size() > 1) {
        throw Error(place + ": it is in Fortran order: write it with numpy.ascontiguousarray");
    }
    array.bytes = get_item_size(array.type, place) * count_elements(array.shape);
    const auto start = 8 + length_bytes + length;
    if (bytes.size() - start < array.bytes) throw Error(place + ": the file is cut short");
    array.data = allocate(array.bytes);
    std::memcpy(array.data.get(), bytes.data() + start, array.bytes);
    return array;
}

// A file in a zip archive, as the directory of the archive describes it.
struct Member {
    std::string name;
    std::uint64_t method, packed_size, size, offset;
};

// Replaces numbers that need more than 32 bits by those of the zip64 extra field, which lists them in a fixed order.
void apply_zip64(Member& member, const std::string& extra, const std::string& place) {
    for (std::size_t offset = 0; offset + 4 <= extra.size();) {
        const auto kind = read_integer(extra, offset, 2, place);
        const auto length = static_cast<std::size_t>(read_integer(extra, offset + 2, 2, place));
        if (kind == 1) {
            std::size_t value = offset + 4;
            for (auto* field : {&member.size, &member.packed_size, &member.offset}) {
                if (*field != 0xffffffffU) continue;
                *field = read_integer(extra, value, 8, place);
                value += 8;
            }
        }
        offset += 4 + length;
    }
}

std::vector<Member> read_directory(const std::string& bytes, const std::string& place) {
    const auto end = bytes.rfind("PK\x05\x06");
    if (end == std::string::npos) throw Error(place + ": not an .npz file: write it with numpy.savez");
    auto count = read_integer(bytes, end + 10, 2, place);
    auto offset = static_cast<std::size_t>(read_integer(bytes, end + 16, 4, place));
    const auto zip64_end = bytes.rfind("PK\x06\x06", end);
    if (offset == 0xffffffffU && zip64_end != std::string::npos) {
        count = read_integer(bytes, zip64_end + 32, 8, place);
        offset = static_cast<std::size_t>(read_integer(bytes, zip64_end + 48, 8, place));
    }
    std::vector<Member> members;
    for (std::uint64_t i = 0; i < count; ++i) {
        const auto name_size = static_cast<std::size_t>(read_integer(bytes, offset + 28, 2, place));
        const auto extra_size = static_cast<std::size_t>(read_integer(bytes, offset + 30, 2, place));
        const auto comment_size = static_cast<std::size_t>(read_integer(bytes, offset + 32, 2, place));
        Member member{read_part(bytes, offset + 46, name_size, place), read_integer(bytes, offset + 10, 2, place),
                      read_integer(bytes, offset + 20, 4, place), read_integer(bytes, offset + 24, 4, place),
                      read_integer(bytes, offset + 42, 4, place)};
        apply_zip64(member, read_part(bytes, offset + 46 + name_size, extra_size, place), place);
        members.push_back(member);
        offset += 46 + name_size + extra_size + comment_size;
    }
    return members;
}

}  // namespace

std::shared_ptr<void> allocate(std::size_t bytes) {
    const auto rounded = (bytes / ALIGNMENT_BYTES + 1) * ALIGNMENT_BYTES;
    void* memory = std::aligned_alloc(ALIGNMENT_BYTES, rounded);
    if (memory == nullptr) throw Error("there is not enough memory for " + std::to_string(bytes) + " bytes");
    return {memory, std::free};
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
    std::map<std::string, Array> arrays;
    for (const auto& member : read_directory(bytes, path)) {
        const auto place = path + ": '" + member.name + "'";
        if (member.method != 0) throw Error(place + " is compressed: write the file with numpy.savez");
        const auto offset = static_cast<std::size_t>(member.offset);
        const auto start = offset + 30 + static_cast<std::size_t>(read_integer(bytes, offset + 26, 2, place)) +
                           static_cast<std::size_t>(read_integer(bytes, offset + 28, 2, place));
        const auto stem = member.name.size() > 4 ? member.name.size() - 4 : 0;
        if (member.name.substr(stem) != ".npy") {
            throw Error(place + " is not an array: write the file with numpy.savez");
        }
        arrays[member.name.substr(0, stem)] =
            parse_npy(read_part(bytes, start, static_cast<std::size_t>(member.size), place), place);
    }
    return arrays;
}

void write_npy(const std::string& path, const Tensor& tensor) {
    std::string header = "{'descr': '" + numpy_name(tensor.type) + "', 'fortran_order': False, 'shape': " +
                         to_string(tensor.shape) + ", }";
    // Spaces are added until the data starts at a multiple of the alignment. Ten bytes precede the header.
    header += std::string(ALIGNMENT_BYTES - 1 - (10 + header.size()) % ALIGNMENT_BYTES, ' ') + "\n";
    if (header.size() > 0xffff) throw Error(path + ": its shape has too many axes");
    const std::string size{static_cast<char>(header.size() & 0xffU), static_cast<char>(header.size() >> 8U)};
    std::ofstream file(path, std::ios::binary);
    file << MAGIC << std::string{'\x01', '\x00'} << size << header;
    file.write(static_cast<const char*>(tensor.data), static_cast<std::streamsize>(tensor.bytes()));
    file.close();
    if (!file) throw Error(path + ": cannot be written: " + std::strerror(errno));
}

}  // namespace dicompiler
