// Reads numpy's .npy files and uncompressed .npz files, and writes .npy files.
#pragma once

#include <map>
#include <string>

#include "tensor.hpp"

namespace dicompiler {

// An array that was read from a file, in C order. `type` is numpy's name of the element type, such as "<f4".
struct Array {
    std::string type;
    Shape shape;
    std::shared_ptr<void> data;
    std::size_t bytes = 0;
};

constexpr std::size_t ALIGNMENT_BYTES = 64;
// Allocates at least `bytes` bytes, even if `bytes` is 0, at an address that is a multiple of ALIGNMENT_BYTES.
std::shared_ptr<void> allocate(std::size_t bytes);

// All functions below throw Error with the name of the file.

// Reads a whole file.
std::string read_file(const std::string& path);
Array read_npy(const std::string& path);
// Reads all arrays of a file that numpy.savez has written, and returns them by name.
std::map<std::string, Array> read_npz(const std::string& path);
void write_npy(const std::string& path, const Tensor& tensor);

}  // namespace dicompiler
