// Memory of the frames in flight (inference requests that are being computed). A FrameBuffers object has the tensors of
// one frame, and the segments that read and write them.
#pragma once

#include <memory>
#include <vector>

#include "engine.hpp"
#include "program.hpp"

namespace dicompiler {

struct FrameBuffers {
    std::shared_ptr<void> memory, input_copy_memory;
    std::vector<Tensor> tensors;
    // The segment of each entry of Rank::runs; null if that entry only makes copies.
    std::vector<std::unique_ptr<BoundSegment>> segments;
};

// The offset of each tensor of known shape in a frame's memory. Two tensors share bytes if one is computed after the
// last use of the other. Received tensors occupy their bytes from the start of the frame, sent and delivered tensors
// until its end. Segment inputs that are assembled by copies are in a second memory, which all frames share.
struct BufferLayout {
    std::vector<std::size_t> offsets;
    // The sizes of the frame's memory and of the memory that all frames share.
    std::size_t bytes, input_copy_bytes;
    // For each tensor: true if it is in the memory that all frames share.
    std::vector<bool> is_input_copy;
};
BufferLayout make_layout(const Rank& rank);

// Makes at least `count` buffers, the same number for each role of the rank (the normal plan, a replica or a failure
// plan). With n roles, buffer i is for frames of role i mod n. Buffers must not be moved, because the bound segments
// point to their tensors.
std::vector<std::unique_ptr<FrameBuffers>> make_frame_buffers(const std::vector<Rank>& roles, std::size_t count,
                                                              const std::vector<std::vector<Segment*>>& segments);

}  // namespace dicompiler
