// The source of the network's inputs and the destination of its outputs. Replace application.cc by your own.
#pragma once

#include <cstddef>

namespace dicompiler {

// Writes input `index` of the network for the next frame to `data`, `bytes` long. Images are (N, H, W, C). Returns
// false if there are no more frames.
bool ReadInput(int index, void* data, std::size_t bytes);

// Receives output `index` of the network. Returns false to stop.
bool WriteOutput(int index, const void* data, std::size_t bytes);

}  // namespace dicompiler
