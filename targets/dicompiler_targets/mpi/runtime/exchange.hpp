// Exchanges messages by MPI while frames are in flight. One thread calls MPI; the step executor computes in another.
#pragma once

#include <atomic>
#include <map>

#include "step_executor.hpp"

namespace dicompiler {

// How frames begin and end among all ranks. Ranks that begin frames by themselves (sources) limit the frames in flight:
// each rank that delivers outputs (a sink) sends them a message when it has finished a frame.
struct FrameFlow {
    std::vector<int> sources, sinks;
    std::size_t frames, in_flight;
    // Time allowed for all frames.
    double timeout_s;
};

struct ExchangeTimes {
    // On the first source: seconds from the start of each frame until its last output is delivered, and from the start
    // of the first frame to the end of the last one.
    std::vector<double> frames;
    double total = 0;
    // Payload bytes by transfer, and the seconds in which at least one message was being sent.
    std::map<int, std::size_t> sent_bytes;
    double send = 0;
    // When this rank began; on the first source also when each frame began.
    Clock::time_point start;
    std::vector<Clock::time_point> frame_starts;
    // The sends of the last frame.
    std::vector<TimelineEntry> timeline;
};

// Thrown if a signal has requested this process to end.
struct Stopped {};

// Executes all frames. `stop`: set by a signal handler; ends the exchange with Stopped.
ExchangeTimes exchange(const std::vector<Rank>& roles, const FrameFlow& flow,
                       std::vector<std::unique_ptr<FrameBuffers>>& buffers, StepExecutor& executor,
                       const std::atomic<bool>& stop);

// A barrier that sleeps while it waits, so that ranks without work do not take processor time from the others.
void wait_at_barrier();

}  // namespace dicompiler
