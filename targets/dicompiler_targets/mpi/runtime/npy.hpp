// Reads numpy's .npy files and uncompressed .npz files, and writes .npy files.
#pragma once

#include <map>
#include <string>

#include "tensor.hpp"

namespace dicompiler {

// An array from a file, in C order. `type`: numpy's name, such as "<f4".
struct Array {
    std::string type;
    Shape shape;
    std::shared_ptr<void> data;
    std::size_t bytes = 0;
};

constexpr std::size_t ALIGNMENT_BYTES = 64;
// Allocates at least `bytes` bytes, and at least one, that start at a multiple of ALIGNMENT_BYTES.
std::shared_ptr<void> allocate(std::size_t bytes);

// Reads a whole file. Throws Error that names the file, as all functions here do.
std::string read_file(const std::string& path);
Array read_npy(const std::string& path);
// Reads the arrays of a file by numpy.savez, by name.
std::map<std::string, Array> read_npz(const std::string& path);
void write_npy(const std::string& path, const Tensor& tensor);

}  // namespace dicompiler
