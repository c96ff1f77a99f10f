// An application for a first test on a host. It reads the inputs from input0.bin, input1.bin … and writes the outputs
// to output0.bin … . A file has its frames one after another. On a board, read your sensor here instead.
#include "application.h"

#include <cstdio>

namespace dicompiler {
namespace {

constexpr int kMaxFiles = 16;

// Opens file `index` unless it is open already.
bool Open(std::FILE** files, const char* prefix, int index, const char* mode) {
  if (index < 0 || index >= kMaxFiles) return false;
  if (files[index] == nullptr) {
    char name[32];
    std::snprintf(name, sizeof name, "%s%d.bin", prefix, index);
    files[index] = std::fopen(name, mode);
  }
  return files[index] != nullptr;
}

}  // namespace

bool ReadInput(int index, void* data, std::size_t bytes) {
  static std::FILE* files[kMaxFiles];
  return Open(files, "input", index, "rb") && std::fread(data, 1, bytes, files[index]) == bytes;
}

bool WriteOutput(int index, const void* data, std::size_t bytes) {
  static std::FILE* files[kMaxFiles];
  return Open(files, "output", index, "wb") && std::fwrite(data, 1, bytes, files[index]) == bytes &&
         std::fflush(files[index]) == 0;
}

}  // namespace dicompiler
