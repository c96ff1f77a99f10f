// Executes the steps of a rank (running a segment, sending a tensor, and so on) for the frames in flight. Tensors that
// are ready are sent first. Otherwise, it executes the next step of the oldest frame that can continue.
//
// A role is the normal plan, a replica or a failure plan. A frame does not overtake another frame of the same role,
// because the tensors of a transfer must be sent in frame order.
//
// A worker thread executes the steps, while the main thread sends and receives. The main thread executes short steps
// itself if only one frame is in flight, because waking the worker would take as long. If all messages are small, it
// executes longer steps too.
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

// Work for the main thread: tensors to send (`send` is an index in Rank::sends), and frames of which all steps are
// done.
struct ExecutorEvents {
    struct Send { std::size_t frame, send; };
    std::vector<Send> sends;
    std::vector<std::size_t> executed_frames;
};

// An activity of a rank for one frame: "run", "send" or "wait". `index` is the index of the segment in
// ExecutionTimes::segments for "run", else that of the transfer. It is -1 for a wait that no transfer causes.
struct TimelineEntry {
    const char* kind;
    long index;
    std::size_t frame;
    Clock::time_point start, end;
};

struct ExecutionTimes {
    // The seconds that each segment has taken in all frames. The segments of all roles are numbered role by role.
    std::vector<double> segments;
    // The seconds in which frames were in flight, but none of them could continue.
    double wait = 0;
    // The time when this rank began to compute each frame; the clock's zero if it did not compute the frame.
    std::vector<Clock::time_point> compute_starts;
    // The activities for the last frame.
    std::vector<TimelineEntry> timeline;
};

class StepExecutor {
public:
    // A function that delivers an output of a frame. `file` is the end of the name of the output's file.
    using Deliver = std::function<void(std::size_t frame, const Tensor& tensor, const std::string& file)>;

    // `last_frame` is the number of the last frame. `min_seconds` is the minimum duration of each segment, or empty.
    StepExecutor(const std::vector<Rank>& roles, std::vector<std::unique_ptr<FrameBuffers>>& buffers,
                 FrameInputs& inputs, Deliver deliver, std::size_t last_frame, std::vector<double> min_seconds);
    ~StepExecutor();

    // Adds a frame whose tensors MPI can receive from now on.
    void begin_frame(std::size_t frame);
    // Reports that a tensor of the frame has been received. `receive` is an index in Rank::receives.
    void receive_completed(std::size_t frame, std::size_t receive);
    // Executes the next step in the calling thread if the step was short the last time. Returns true if it did so.
    bool run_short_step();
    // Returns the events since the last call. Waits up to `timeout` for an event. Throws the error of a failed step.
    ExecutorEvents take_events(std::chrono::microseconds timeout);
    // Returns true while a step is being executed.
    bool is_busy();
    // Describes for an error message the step that is executed, or the tensor that is missing. Returns "" if there are
    // no frames. Sets `peer` to the rank that must send the missing tensor, or to -1.
    std::string describe_state(int& peer);
    // Ends the worker thread after its current step, and returns the measured times.
    ExecutionTimes stop();

private:
    struct InFlightFrame {
        std::size_t number;
        // For each entry of Rank::receives: true if the tensor has been received.
        std::vector<bool> received;
        std::size_t next_step = 0;
    };

    void run_worker();
    // Returns the oldest frame whose next step sends a tensor that is there; otherwise the oldest frame whose next step
    // can be executed, or null. Other ranks would have to wait for a tensor that is sent after a segment.
    InFlightFrame* find_ready_frame();
    // Returns true if no other frame is in flight, and the next step of this frame was short the last time.
    bool is_short(const InFlightFrame& frame) const;
    // Executes the frame's next step while the lock is released, or removes the frame after its last step.
    void advance(std::unique_lock<std::mutex>& lock, InFlightFrame& frame);
    // Wakes the thread that must execute the next step, and records times in which no frame can continue.
    void schedule_next();
    // Returns the index of a receive that the frame's next step waits for, or the number of receives if there is none.
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
    // For each step of each role: the indices in Rank::receives of the tensors that the step reads.
    std::vector<std::vector<std::vector<std::size_t>>> needed_receives_;
    // For each role: the duration in seconds up to which the main thread executes a step.
    std::vector<double> short_steps_s_;
    // For each step of each role: its duration in seconds the last time.
    std::vector<std::vector<double>> last_seconds_;
    // The value of each state (a tensor that is kept for the next frame), and the number of frames that have stored a
    // value.
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
    // The last wait that began. It is recorded in the timeline if the last frame was in flight when it began.
    TimelineEntry wait_{};
    bool is_waiting_ = false, is_recorded_ = false;
    std::exception_ptr failure_;
    std::thread thread_;
};

}  // namespace dicompiler
