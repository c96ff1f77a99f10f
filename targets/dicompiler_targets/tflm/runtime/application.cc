// An application for a first trial on a host: inputs are files input0.bin, input1.bin …, outputs go to output0.bin …;
// a file with several frames has them one after another. On a board, read your sensor here.
#include "application.h"

#include <cstdio>

namespace dicompiler {
namespace {

constexpr int kFiles = 16;

bool Open(std::FILE** files, const char* kind, int index, const char* mode) {
  if (index < 0 || index >= kFiles) return false;
  if (files[index] == nullptr) {
    char name[32];
    std::snprintf(name, sizeof name, "%s%d.bin", kind, index);
    files[index] = std::fopen(name, mode);
  }
  return files[index] != nullptr;
}

}  // namespace

bool ReadInput(int index, void* data, std::size_t bytes) {
  static std::FILE* files[kFiles];
  return Open(files, "input", index, "rb") && std::fread(data, 1, bytes, files[index]) == bytes;
}

bool WriteOutput(int index, const void* data, std::size_t bytes) {
  static std::FILE* files[kFiles];
  return Open(files, "output", index, "wb") && std::fwrite(data, 1, bytes, files[index]) == bytes &&
         std::fflush(files[index]) == 0;
}

}  // namespace dicompiler
