// Plays a rank's steps for the frames on their way: of the oldest frame that can go on, the next step. No frame overtakes
// another of its role, so that what goes for a transfer goes in the order of frames.
//
// Steps are played in a thread of its own, so that messages come and go meanwhile. Where one frame alone is on its way,
// those that were quick the last time are played by who speaks MPI: to wake another thread twice takes as long as they do.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

#include "samples.hpp"
#include "slots.hpp"

namespace dicompiler {

using Clock = std::chrono::steady_clock;

// Seconds from `start` to now.
double since(Clock::time_point start);

// What the thread that speaks MPI is to do: sends (their place in Rank::sends) and frames whose last step was played.
struct News {
    struct Sending { std::size_t frame, send; };
    std::vector<Sending> sends;
    std::vector<std::size_t> played;
};

// Something that took time for a frame: "run" (a segment: its place in Times::segments), or "send" or "wait" (a
// transfer; -1: none).
struct Span {
    const char* kind;
    long index;
    std::size_t frame;
    Clock::time_point start, end;
};

struct Times {
    // Seconds of each segment, role by role, and those in which frames were on their way but none could go on.
    std::vector<double> segments;
    double wait = 0;
    // When this rank began to compute each frame; of what it has no part in, the clock's zero.
    std::vector<Clock::time_point> begun;
    // Of the last frame.
    std::vector<Span> spans;
};

class Player {
public:
    // Writes an output of a frame.
    using Deliver = std::function<void(std::size_t frame, const Tensor& tensor, const std::string& file)>;

    // `last`: the number of the last frame. `least`: seconds that a call of each segment takes at least.
    Player(const std::vector<Rank>& roles, std::vector<std::unique_ptr<Slot>>& slots, Samples& samples,
           Deliver deliver, std::size_t last, std::vector<double> least);
    ~Player();

    // The frame's receives were posted: it is on its way.
    void begin(std::size_t frame);
    // A frame's receive (its place in Rank::receives) is complete.
    void arrived(std::size_t frame, std::size_t receive);
    // Plays the next step if it is a quick one; whether it was.
    bool help();
    // What has come since the last call; waits for it, but not longer than that. Throws what ended a step.
    News take(std::chrono::microseconds patience);
    // Whether it is inside a step, whatever that takes.
    bool busy();
    // What it is doing, or waits for, in words: for errors; empty without frames. `peer`: whom it waits for, or -1.
    std::string state(int& peer);
    // Ends the thread, after its step; the times of all that was played.
    Times stop();

private:
    struct Frame {
        std::size_t number;
        std::vector<bool> here;
        std::size_t position = 0;
    };

    void loop();
    Frame* ready();
    // Whether the frame is the only one and its next step took so short the last time that it is played where it is
    // noticed.
    bool quick(const Frame& frame) const;
    // Plays the frame's next step, without the lock, or notes its end.
    void advance(std::unique_lock<std::mutex>& lock, Frame& frame);
    // Tells who is to play next, and whether all wait.
    void pass_on();
    // The receive that the frame's next step lacks, or the number of receives.
    std::size_t missing(const Frame& frame) const;
    // Whether what the frame before keeps is there, if the frame's next step takes it.
    bool kept(const Frame& frame) const;
    void play(const Rank::Step& step, std::size_t frame);
    void take(const Rank::State& state, std::size_t place, std::size_t frame);
    const Rank& role(std::size_t frame) const { return roles_[frame % roles_.size()]; }

    const std::vector<Rank>& roles_;
    std::vector<std::unique_ptr<Slot>>& slots_;
    Samples& samples_;
    Deliver deliver_;
    const std::size_t last_;
    const std::vector<double> least_;
    // Of each role's steps: the receives (their place in Rank::receives) that must be complete.
    std::vector<std::vector<std::vector<std::size_t>>> needs_;
    // Of each role's steps: the seconds that it took last.
    std::vector<std::vector<double>> took_;
    // Of each state what is kept for the next frame, and for how many frames it was; who has states has one role.
    std::vector<std::vector<char>> kept_;
    std::vector<std::size_t> keepings_;
    // Where the segments of each role begin in Times::segments.
    std::vector<std::size_t> first_;
    std::mutex mutex_;
    std::condition_variable changed_, news_;
    std::deque<Frame> frames_;
    News told_;
    Times times_;
    bool busy_ = false, stopping_ = false;
    // Since when all wait, and for what; whether the last frame is on its way.
    Span idle_{};
    bool waiting_ = false, noted_ = false;
    std::exception_ptr failure_;
    std::thread thread_;
};

}  // namespace dicompiler
