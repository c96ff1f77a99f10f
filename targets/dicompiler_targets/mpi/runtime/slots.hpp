// Memory of the frames that are on their way: each slot holds the tensors of one frame, and segments tied to them, none
// where nothing is computed.
#pragma once

#include <memory>
#include <vector>

#include "engine.hpp"
#include "program.hpp"

namespace dicompiler {

struct Slot {
    std::shared_ptr<void> memory, joined;
    std::vector<Tensor> tensors;
    std::vector<std::unique_ptr<Call>> calls;
};

// Where each fixed tensor starts in a slot's memory, and how much that is. Tensors share a place if one is made after
// the last use of the other. What is received is there from the start of a frame, for its receives are posted then;
// what is sent or delivered stays to the end. What is joined for a segment is in memory of its own, of so many bytes,
// which all slots share: one segment runs at a time.
struct Layout {
    std::vector<std::size_t> offsets;
    std::size_t bytes, joined;
    std::vector<bool> joins;
};
Layout lay_out(const Rank& rank);

// Slot i is for frames of role i mod n; there are at least `count`, and as many for each role. segments: of each role.
// Slots do not move: calls point into them.
std::vector<std::unique_ptr<Slot>> make_slots(const std::vector<Rank>& roles, std::size_t count,
                                              const std::vector<std::vector<Segment*>>& segments);

}  // namespace dicompiler
