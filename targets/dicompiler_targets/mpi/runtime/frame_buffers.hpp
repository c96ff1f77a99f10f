// Memory of the frames in flight. Each FrameBuffers holds the tensors of one frame and the segments bound to them.
#pragma once

#include <memory>
#include <vector>

#include "engine.hpp"
#include "program.hpp"

namespace dicompiler {

struct FrameBuffers {
    std::shared_ptr<void> memory, input_copy_memory;
    std::vector<Tensor> tensors;
    // One for each run of the rank; null if the run makes copies only.
    std::vector<std::unique_ptr<BoundSegment>> segments;
};

// The offset of each fixed tensor in a frame's memory, and the size of that memory. Tensors share bytes if one is
// computed after the last use of the other. Received tensors occupy their bytes from the start of the frame, because
// their receives are posted then. Sent and delivered tensors keep them to the end of the frame. Copied inputs of
// segments lie in a memory of their own, which all frames share, because only one segment runs at a time.
struct BufferLayout {
    std::vector<std::size_t> offsets;
    std::size_t bytes, input_copy_bytes;
    // True for tensors that lie in the shared memory of copied inputs.
    std::vector<bool> is_input_copy;
};
BufferLayout make_layout(const Rank& rank);

// Makes at least `count` buffers, the same number for each role; those at index i are for frames of role i mod n.
// `segments`: those of each role. The buffers do not move, because bound segments point into them.
std::vector<std::unique_ptr<FrameBuffers>> make_frame_buffers(const std::vector<Rank>& roles, std::size_t count,
                                                              const std::vector<std::vector<Segment*>>& segments);

}  // namespace dicompiler
