// Exchanges tensors with other ranks (MPI processes, one for each device). The main thread calls MPI, while the step
// executor computes in its own thread.
#pragma once

#include <atomic>
#include <map>

#include "step_executor.hpp"

namespace dicompiler {

// How frames begin and end among all ranks. A source is a rank that begins frames without receiving tensors. A sink is
// a rank that delivers outputs. A sink reports each finished frame to all sources, which limit the number of frames in
// flight.
struct FrameFlow {
    std::vector<int> sources, sinks;
    std::size_t frames, in_flight;
    // Seconds that all frames together may take.
    double timeout_s;
};

struct ExchangeTimes {
    // Only on the first source: the seconds from the start of each frame to the delivery of its last output, and the
    // seconds from the start of the first frame to the end of the last frame.
    std::vector<double> frames;
    double total = 0;
    // The sent bytes of each transfer (a tensor from one rank to another), by its index, and the seconds in which at
    // least one tensor was being sent.
    std::map<int, std::size_t> sent_bytes;
    double send = 0;
    // The time when this rank began, and only on the first source: the time when each frame began.
    Clock::time_point start;
    std::vector<Clock::time_point> frame_starts;
    // The times of the sends of the last frame.
    std::vector<TimelineEntry> timeline;
};

// Thrown when a signal has asked this process to end.
struct Stopped {};

// Sends and receives the tensors of all frames. Throws Stopped when a signal handler sets `stop`.
ExchangeTimes exchange(const std::vector<Rank>& roles, const FrameFlow& flow,
                       std::vector<std::unique_ptr<FrameBuffers>>& buffers, StepExecutor& executor,
                       const std::atomic<bool>& stop);

// Waits until all ranks have called this function. It sleeps meanwhile, because MPI_Barrier would keep a core busy.
void wait_at_barrier();

}  // namespace dicompiler
