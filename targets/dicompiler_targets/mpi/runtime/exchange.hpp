// All of a run that speaks MPI while frames are on their way; one thread does, the player computes in another.
#pragma once

#include <atomic>
#include <map>

#include "player.hpp"

namespace dicompiler {

// How a frame begins and ends among all ranks. Those that begin by themselves (starters) hold back the next frame until
// enough earlier ones are done: whoever delivers outputs (enders) sends them an empty message for each frame.
struct Flow {
    std::vector<int> starters, enders;
    std::size_t frames, in_flight;
    // Seconds for all frames.
    double timeout;
};

struct Measured {
    // Of the first starter: seconds from a frame's beginning until the last of its outputs is delivered; of all frames.
    std::vector<double> frames;
    double total = 0;
    // Payload bytes by transfer; seconds in which at least one of them was on its way.
    std::map<int, std::size_t> sent;
    double send = 0;
    // When this rank began; of the first starter, when each frame began; what was sent for the last frame.
    Clock::time_point start;
    std::vector<Clock::time_point> begun;
    std::vector<Span> spans;
};

// Thrown where a signal has asked this process to end.
struct Stopped {};

// Plays all frames. `stop`: set by a signal, ends it with Stopped.
Measured exchange(const std::vector<Rank>& roles, const Flow& flow, std::vector<std::unique_ptr<Slot>>& slots,
                  Player& player, const std::atomic<bool>& stop);

// A barrier that does not keep the processor busy: ranks without work wait there while others compute.
void barrier();

}  // namespace dicompiler
