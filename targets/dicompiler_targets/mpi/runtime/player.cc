#include "player.hpp"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <thread>

namespace dicompiler {

namespace {

// Seconds of a step that is played by who speaks MPI: for so long nothing else is sent or received.
constexpr double QUICK_S = 300e-6;

// What is computed while a segment is held back has time: it lets everything else go first.
void prefer(int policy) {
    const sched_param none{};
    sched_setscheduler(0, policy, &none);
}

// Waits until then; a sleep may end late.
void hold(Clock::time_point until) {
    std::this_thread::sleep_until(until - std::chrono::microseconds(200));
    while (Clock::now() < until) std::this_thread::yield();
}

// Whether a segment reads the tensor, or something is copied of it.
bool reads(const Rank::Run& run, Rank::Id tensor) {
    const auto copied = [&](const Rank::Copy& copy) { return copy.source == tensor; };
    return std::find(run.inputs.begin(), run.inputs.end(), tensor) != run.inputs.end() ||
           std::any_of(run.joins.begin(), run.joins.end(), copied) ||
           std::any_of(run.cuts.begin(), run.cuts.end(), copied);
}

}  // namespace

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

Player::Player(const std::vector<Rank>& roles, std::vector<std::unique_ptr<Slot>>& slots, Samples& samples,
               Deliver deliver, std::size_t last, std::vector<double> least)
    : roles_(roles),
      slots_(slots),
      samples_(samples),
      deliver_(std::move(deliver)),
      last_(last),
      least_(std::move(least)),
      needs_(roles.size()) {
    // Only segments read what is received.
    for (std::size_t r = 0; r < roles.size(); ++r) {
        const auto& rank = roles[r];
        took_.emplace_back(rank.steps.size(), 2 * QUICK_S);
        first_.push_back(times_.segments.size());
        times_.segments.resize(times_.segments.size() + rank.runs.size());
        for (const auto& step : rank.steps) {
            std::vector<std::size_t> needed;
            for (std::size_t i = 0; step.kind == Rank::Step::run && i < rank.receives.size(); ++i) {
                if (reads(rank.runs[step.index], rank.receives[i].tensor)) needed.push_back(i);
            }
            needs_[r].push_back(needed);
        }
    }
    for (const auto& state : roles[0].states) kept_.emplace_back(roles[0].tensors[state.tensor].bytes());
    keepings_.resize(kept_.size());
    times_.begun.resize(last_ + 1);
    thread_ = std::thread([this] { loop(); });
}

Player::~Player() {
    if (thread_.joinable()) stop();
}

void Player::begin(std::size_t frame) {
    const std::lock_guard<std::mutex> lock(mutex_);
    frames_.push_back({frame, std::vector<bool>(role(frame).receives.size())});
    pass_on();
}

void Player::arrived(std::size_t frame, std::size_t receive) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& one : frames_) {
        if (one.number == frame) one.here[receive] = true;
    }
    pass_on();
}

bool Player::help() {
    std::unique_lock<std::mutex> lock(mutex_);
    auto* frame = busy_ || failure_ ? nullptr : ready();
    if (frame == nullptr || !quick(*frame)) return false;
    advance(lock, *frame);
    return true;
}

News Player::take(std::chrono::microseconds patience) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto any = [this] {
        const auto* frame = busy_ ? nullptr : ready();
        return failure_ || !told_.sends.empty() || !told_.played.empty() || (frame != nullptr && quick(*frame));
    };
    if (!any() && patience.count() > 0) news_.wait_for(lock, patience, any);
    if (failure_) std::rethrow_exception(failure_);
    News found;
    std::swap(found, told_);
    return found;
}

bool Player::busy() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return busy_;
}

std::string Player::state(int& peer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    peer = -1;
    if (frames_.empty()) return "";
    const auto& frame = frames_.front();
    const auto where = " of frame " + std::to_string(frame.number);
    const auto lacking = missing(frame);
    const auto& rank = role(frame.number);
    if (busy_ || lacking == rank.receives.size()) {
        return "it still computes step " + std::to_string(frame.position) + where;
    }
    const auto& receive = rank.receives[lacking];
    peer = receive.from;
    return "tensor '" + rank.tensors[receive.tensor].name + "'" + where + " did not come in time";
}

Times Player::stop() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
        changed_.notify_one();
    }
    thread_.join();
    return times_;
}

std::size_t Player::missing(const Frame& frame) const {
    const auto& needs = needs_[frame.number % roles_.size()];
    if (frame.position < needs.size()) {
        for (const auto receive : needs[frame.position]) {
            if (!frame.here[receive]) return receive;
        }
    }
    return frame.here.size();
}

Player::Frame* Player::ready() {
    // How far the last frame of each role has come.
    std::vector<std::size_t> ahead;
    for (const auto& rank : roles_) ahead.push_back(rank.steps.size() + 1);
    for (auto& frame : frames_) {
        auto& before = ahead[frame.number % roles_.size()];
        if (frame.position < before && missing(frame) == frame.here.size() && kept(frame)) return &frame;
        before = frame.position;
    }
    return nullptr;
}

bool Player::kept(const Frame& frame) const {
    const auto& steps = role(frame.number).steps;
    if (frame.position == steps.size() || steps[frame.position].kind != Rank::Step::take) return true;
    return keepings_[steps[frame.position].index] == frame.number;
}

bool Player::quick(const Frame& frame) const {
    const auto& took = took_[frame.number % roles_.size()];
    return frames_.size() == 1 && (frame.position == took.size() || took[frame.position] < QUICK_S);
}

void Player::pass_on() {
    if (busy_) return;
    const auto* frame = ready();
    const bool waits = frame == nullptr && !frames_.empty();
    Span next{"wait", -1, 0, Clock::now(), {}};
    if (waits) {
        const auto& first = frames_.front();
        const auto lacking = missing(first);
        if (lacking < first.here.size()) next.index = role(first.number).receives[lacking].transfer;
        next.frame = first.number;
    }
    const bool same = waits && next.index == idle_.index && next.frame == idle_.frame;
    if (waiting_ && !same) {
        idle_.end = next.start;
        times_.wait += std::chrono::duration<double>(idle_.end - idle_.start).count();
        if (noted_) times_.spans.push_back(idle_);
    }
    if (!waiting_ || !same) {
        idle_ = next;
        noted_ = waits && frames_.back().number == last_;
    }
    waiting_ = waits;
    if (frame != nullptr) (quick(*frame) ? news_ : changed_).notify_one();
}

void Player::loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stopping_ && !failure_) {
        auto* frame = busy_ ? nullptr : ready();
        if (frame == nullptr || quick(*frame)) {
            changed_.wait(lock);
        } else {
            advance(lock, *frame);
        }
    }
}

void Player::advance(std::unique_lock<std::mutex>& lock, Frame& frame) {
    const auto number = frame.number;
    const auto& rank = role(number);
    if (frame.position == rank.steps.size()) {
        told_.played.push_back(number);
        const auto same = [&](const Frame& other) { return other.number == number; };
        frames_.erase(std::find_if(frames_.begin(), frames_.end(), same));
        pass_on();
        return news_.notify_one();
    }
    const auto& step = rank.steps[frame.position];
    const auto start = Clock::now();
    busy_ = true;
    lock.unlock();
    std::exception_ptr failed;
    try {
        auto& tensors = slots_[number % slots_.size()]->tensors;
        if (frame.position == 0 && !rank.inputs.empty()) samples_.give(number, rank.inputs, tensors);
        if (step.kind != Rank::Step::send) play(step, number);
    } catch (...) {
        failed = std::current_exception();
    }
    lock.lock();
    busy_ = false;
    if (step.kind == Rank::Step::keep) ++keepings_[rank.keeps[step.index].state];
    took_[number % roles_.size()][frame.position] = since(start);
    if (step.kind == Rank::Step::send && !failed) told_.sends.push_back({number, step.index});
    failure_ = failed;
    ++frame.position;  // deques keep their elements in place while others are added at the end
    news_.notify_one();
    pass_on();
}

void Player::play(const Rank::Step& step, std::size_t frame) {
    auto& slot = *slots_[frame % slots_.size()];
    if (step.kind == Rank::Step::output) {
        const auto& output = role(frame).outputs[step.index];
        deliver_(frame, slot.tensors[output.tensor], output.file);
        return;
    }
    if (step.kind == Rank::Step::take) return take(role(frame).states[step.index], step.index, frame);
    if (step.kind == Rank::Step::keep) {
        const auto& keep = role(frame).keeps[step.index];
        std::memcpy(kept_[keep.state].data(), slot.tensors[keep.tensor].data, kept_[keep.state].size());
        return;
    }
    const auto start = Clock::now();
    const auto number = first_[frame % roles_.size()] + step.index;
    if (times_.begun[frame] == Clock::time_point{}) times_.begun[frame] = start;
    const auto held = number < least_.size() && least_[number] > 0;
    if (held) prefer(SCHED_IDLE);
    const auto& run = role(frame).runs[step.index];
    const auto& tensors = slot.tensors;
    for (const auto& one : run.joins) copy(one.box, tensors[one.source], tensors[one.target]);
    if (slot.calls[step.index]) slot.calls[step.index]->run();
    for (const auto& one : run.cuts) copy(one.box, tensors[one.source], tensors[one.target]);
    if (held) {
        prefer(SCHED_OTHER);
        hold(start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(least_[number])));
    }
    const auto end = Clock::now();
    times_.segments[number] += std::chrono::duration<double>(end - start).count();
    if (frame == last_) times_.spans.push_back({"run", static_cast<long>(number), frame, start, end});
}

void Player::take(const Rank::State& state, std::size_t place, std::size_t frame) {
    auto& tensor = slots_[frame % slots_.size()]->tensors[state.tensor];
    if (samples_.begin(frame, state, tensor)) return;
    std::memcpy(tensor.data, kept_[place].data(), kept_[place].size());  // zeros before the first frame
}

}  // namespace dicompiler
