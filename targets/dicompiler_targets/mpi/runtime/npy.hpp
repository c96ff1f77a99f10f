// numpy's files: .npy and uncompressed .npz go in, .npy come out.
#pragma once

#include <map>
#include <string>

#include "tensor.hpp"

namespace dicompiler {

// What a file holds: elements in C order. `type`: numpy's name, such as "<f4".
struct Array {
    std::string type;
    Shape shape;
    std::shared_ptr<void> data;
    std::size_t bytes = 0;
};

constexpr std::size_t ALIGN = 64;
// Memory of so many bytes, at least one, that starts at a multiple of ALIGN.
std::shared_ptr<void> allocate(std::size_t bytes);

// The file's bytes. Errors name the file.
std::string read_file(const std::string& path);
Array read_npy(const std::string& path);
// The arrays by name, as numpy.savez writes them.
std::map<std::string, Array> read_npz(const std::string& path);
void write_npy(const std::string& path, const Tensor& tensor);

}  // namespace dicompiler
