// Executes a rank's steps for the frames in flight: the next step of the oldest frame that can continue. A frame does
// not overtake another one of its role, so that the messages of a transfer are sent in the order of frames.
//
// A worker thread executes the steps, while the main thread sends and receives. If only one frame is in flight, the
// main thread itself executes steps that were short the last time, because waking a thread twice would take as long.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

#include "frame_buffers.hpp"
#include "frame_inputs.hpp"

namespace dicompiler {

using Clock = std::chrono::steady_clock;

// Returns the seconds from `start` to now.
double seconds_since(Clock::time_point start);

// Work for the main thread: sends (indices of Rank::sends) that are due, and frames whose last step has been executed.
struct ExecutorEvents {
    struct Send { std::size_t frame, send; };
    std::vector<Send> sends;
    std::vector<std::size_t> executed_frames;
};

// An activity of a rank for one frame: "run" of a segment (its index in ExecutionTimes::segments), "send" of a transfer
// (its index), or "wait" for a transfer (its index; -1: for nothing in particular).
struct TimelineEntry {
    const char* kind;
    long index;
    std::size_t frame;
    Clock::time_point start, end;
};

struct ExecutionTimes {
    // Seconds of each segment, role by role.
    std::vector<double> segments;
    // Seconds in which frames were in flight but none could continue.
    double wait = 0;
    // When this rank began to compute each frame; the clock's zero for frames that it does not compute.
    std::vector<Clock::time_point> compute_starts;
    // Activities for the last frame.
    std::vector<TimelineEntry> timeline;
};

class StepExecutor {
public:
    // Delivers an output of a frame.
    using Deliver = std::function<void(std::size_t frame, const Tensor& tensor, const std::string& file)>;

    // `last_frame`: the number of the last frame. `min_seconds`: the minimum duration of a call of each segment.
    StepExecutor(const std::vector<Rank>& roles, std::vector<std::unique_ptr<FrameBuffers>>& buffers,
                 FrameInputs& inputs, Deliver deliver, std::size_t last_frame, std::vector<double> min_seconds);
    ~StepExecutor();

    // Adds a frame whose receives have been posted.
    void begin_frame(std::size_t frame);
    // Reports that a receive of the frame (an index of Rank::receives) is complete.
    void receive_completed(std::size_t frame, std::size_t receive);
    // Executes the next step in the calling thread if it is a short one; returns true if it did.
    bool run_short_step();
    // Returns the events since the last call. Waits for some, at most for `timeout`. Throws the error of a failed step.
    ExecutorEvents take_events(std::chrono::microseconds timeout);
    // Returns true while a step is being executed.
    bool is_busy();
    // Returns what the executor does or waits for, as part of an error message; empty if there are no frames. `peer`:
    // the rank that it waits for, or -1.
    std::string describe_state(int& peer);
    // Ends the worker thread after its current step and returns all times.
    ExecutionTimes stop();

private:
    struct InFlightFrame {
        std::size_t number;
        // One for each receive: true if it is complete.
        std::vector<bool> received;
        std::size_t next_step = 0;
    };

    void run_worker();
    // Returns the oldest frame that can continue, or null.
    InFlightFrame* find_ready_frame();
    // Returns true if the frame is the only one in flight and its next step was short the last time.
    bool is_short(const InFlightFrame& frame) const;
    // Executes the frame's next step without holding the lock, or removes the frame after its last step.
    void advance(std::unique_lock<std::mutex>& lock, InFlightFrame& frame);
    // Wakes the thread that is to execute the next step, and records the time during which all frames wait.
    void schedule_next();
    // Returns a receive that the frame's next step still needs, or the number of receives if there is none.
    std::size_t find_missing_receive(const InFlightFrame& frame) const;
    // Returns false if the frame's next step loads a state that the previous frame has not stored yet.
    bool has_state(const InFlightFrame& frame) const;
    void execute(const Rank::Step& step, std::size_t frame);
    void load_state(const Rank::State& state, std::size_t index, std::size_t frame);
    const Rank& get_role(std::size_t frame) const { return roles_[frame % roles_.size()]; }

    const std::vector<Rank>& roles_;
    std::vector<std::unique_ptr<FrameBuffers>>& buffers_;
    FrameInputs& inputs_;
    Deliver deliver_;
    const std::size_t last_frame_;
    const std::vector<double> min_seconds_;
    // For each step of each role: the receives (indices of Rank::receives) that must be complete.
    std::vector<std::vector<std::vector<std::size_t>>> needed_receives_;
    // For each step of each role: its duration the last time.
    std::vector<std::vector<double>> last_seconds_;
    // The value of each state for the next frame, and the number of frames that have stored it. Ranks with states have
    // a single role.
    std::vector<std::vector<char>> stored_states_;
    std::vector<std::size_t> store_counts_;
    // For each role: the index of its first segment in ExecutionTimes::segments.
    std::vector<std::size_t> first_segments_;
    std::mutex mutex_;
    std::condition_variable work_available_, events_available_;
    std::deque<InFlightFrame> frames_;
    ExecutorEvents pending_events_;
    ExecutionTimes times_;
    bool is_busy_ = false, is_stopping_ = false;
    // The current wait of all frames, and whether it belongs to the timeline of the last frame.
    TimelineEntry wait_{};
    bool is_waiting_ = false, is_recorded_ = false;
    std::exception_ptr failure_;
    std::thread thread_;
};

}  // namespace dicompiler
