// Where the network's inputs come from and its outputs go to: application.cc is yours to write.
#pragma once

#include <cstddef>

namespace dicompiler {

// Fills in input `index` of the network for the next frame, `bytes` long, images as (N, H, W, C). Returns whether there
// is a next frame.
bool ReadInput(int index, void* data, std::size_t bytes);

// Takes output `index` of the network. Returns whether to go on.
bool WriteOutput(int index, const void* data, std::size_t bytes);

}  // namespace dicompiler
