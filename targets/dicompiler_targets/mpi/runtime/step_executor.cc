#include "step_executor.hpp"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <thread>

namespace dicompiler {

namespace {

// The main thread executes steps up to this duration. It cannot send or receive meanwhile.
constexpr double SHORT_STEP_S = 300e-6;
// The duration for roles that exchange only messages up to SMALL_MESSAGE_BYTES. The operating system sends and receives
// such messages while the main thread computes.
constexpr double SHORT_STEP_OF_SMALL_MESSAGES_S = 5e-3;
constexpr std::size_t SMALL_MESSAGE_BYTES = 32 << 10;

// Emulated segments, which are delayed on purpose, run with idle priority so that they do not slow down other ranks.
void set_scheduling(int policy) {
    const sched_param none{};
    sched_setscheduler(0, policy, &none);
}

// Sleeps until shortly before `time` and then polls the clock, because a sleep may end late.
void wait_until(Clock::time_point time) {
    std::this_thread::sleep_until(time - std::chrono::microseconds(200));
    while (Clock::now() < time) std::this_thread::yield();
}

// Returns true if the run reads the tensor or copies from it.
bool reads_tensor(const Rank::Run& run, Rank::Id tensor) {
    const auto copies_from = [&](const Rank::Copy& copy) { return copy.source == tensor; };
    return std::find(run.inputs.begin(), run.inputs.end(), tensor) != run.inputs.end() ||
           std::any_of(run.input_copies.begin(), run.input_copies.end(), copies_from) ||
           std::any_of(run.output_copies.begin(), run.output_copies.end(), copies_from);
}

// Returns the duration up to which the main thread executes steps of a role.
double find_longest_short_step(const Rank& role) {
    const auto is_small = [&](const auto& message) {
        const auto& tensor = role.tensors[message.tensor];
        return tensor.fixed && tensor.bytes() <= SMALL_MESSAGE_BYTES;
    };
    const bool has_small_messages = std::all_of(role.sends.begin(), role.sends.end(), is_small) &&
                                    std::all_of(role.receives.begin(), role.receives.end(), is_small);
    return has_small_messages ? SHORT_STEP_OF_SMALL_MESSAGES_S : SHORT_STEP_S;
}

}  // namespace

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

StepExecutor::StepExecutor(const std::vector<Rank>& roles, std::vector<std::unique_ptr<FrameBuffers>>& buffers,
                           FrameInputs& inputs, Deliver deliver, std::size_t last_frame,
                           std::vector<double> min_seconds)
    : roles_(roles),
      buffers_(buffers),
      inputs_(inputs),
      deliver_(std::move(deliver)),
      last_frame_(last_frame),
      min_seconds_(std::move(min_seconds)),
      needed_receives_(roles.size()) {
    // Only steps of kind `run` wait for received tensors, because other steps do not read them.
    for (std::size_t r = 0; r < roles.size(); ++r) {
        const auto& rank = roles[r];
        short_steps_s_.push_back(find_longest_short_step(rank));
        last_seconds_.emplace_back(rank.steps.size(), 2 * short_steps_s_.back());
        first_segments_.push_back(times_.segments.size());
        times_.segments.resize(times_.segments.size() + rank.runs.size());
        for (const auto& step : rank.steps) {
            std::vector<std::size_t> needed;
            for (std::size_t i = 0; step.kind == Rank::Step::run && i < rank.receives.size(); ++i) {
                if (reads_tensor(rank.runs[step.index], rank.receives[i].tensor)) needed.push_back(i);
            }
            needed_receives_[r].push_back(needed);
        }
    }
    for (const auto& state : roles[0].states) stored_states_.emplace_back(roles[0].tensors[state.tensor].bytes());
    store_counts_.resize(stored_states_.size());
    times_.compute_starts.resize(last_frame_ + 1);
    thread_ = std::thread([this] { run_worker(); });
}

StepExecutor::~StepExecutor() {
    if (thread_.joinable()) stop();
}

void StepExecutor::begin_frame(std::size_t frame) {
    const std::lock_guard<std::mutex> lock(mutex_);
    frames_.push_back({frame, std::vector<bool>(get_role(frame).receives.size())});
    schedule_next();
}

void StepExecutor::receive_completed(std::size_t frame, std::size_t receive) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& candidate : frames_) {
        if (candidate.number == frame) candidate.received[receive] = true;
    }
    schedule_next();
}

bool StepExecutor::run_short_step() {
    std::unique_lock<std::mutex> lock(mutex_);
    auto* frame = is_busy_ || failure_ ? nullptr : find_ready_frame();
    if (frame == nullptr || !is_short(*frame)) return false;
    advance(lock, *frame);
    return true;
}

ExecutorEvents StepExecutor::take_events(std::chrono::microseconds timeout) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto has_events = [this] {
        const auto* frame = is_busy_ ? nullptr : find_ready_frame();
        return failure_ || !pending_events_.sends.empty() || !pending_events_.executed_frames.empty() ||
               (frame != nullptr && is_short(*frame));
    };
    if (!has_events() && timeout.count() > 0) events_available_.wait_for(lock, timeout, has_events);
    if (failure_) std::rethrow_exception(failure_);
    ExecutorEvents events;
    std::swap(events, pending_events_);
    return events;
}

bool StepExecutor::is_busy() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return is_busy_;
}

std::string StepExecutor::describe_state(int& peer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    peer = -1;
    if (frames_.empty()) return "";
    const auto& frame = frames_.front();
    const auto of_frame = " of frame " + std::to_string(frame.number);
    const auto missing = find_missing_receive(frame);
    const auto& rank = get_role(frame.number);
    if (is_busy_ || missing == rank.receives.size()) {
        return "it still computes step " + std::to_string(frame.next_step) + of_frame;
    }
    const auto& receive = rank.receives[missing];
    peer = receive.sender;
    return "tensor '" + rank.tensors[receive.tensor].name + "'" + of_frame + " did not arrive in time";
}

ExecutionTimes StepExecutor::stop() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        is_stopping_ = true;
        work_available_.notify_one();
    }
    thread_.join();
    return times_;
}

std::size_t StepExecutor::find_missing_receive(const InFlightFrame& frame) const {
    const auto& needed = needed_receives_[frame.number % roles_.size()];
    if (frame.next_step < needed.size()) {
        for (const auto receive : needed[frame.next_step]) {
            if (!frame.received[receive]) return receive;
        }
    }
    return frame.received.size();
}

StepExecutor::InFlightFrame* StepExecutor::find_ready_frame() {
    // For each role: the next step of the previous frame. A frame may only execute steps before this step. Otherwise,
    // it would overtake the previous frame.
    std::vector<std::size_t> limits;
    for (const auto& rank : roles_) limits.push_back(rank.steps.size() + 1);
    InFlightFrame* oldest = nullptr;
    for (auto& frame : frames_) {
        auto& limit = limits[frame.number % roles_.size()];
        const bool has_inputs = find_missing_receive(frame) == frame.received.size();
        if (frame.next_step < limit && has_inputs && has_state(frame)) {
            const auto& steps = get_role(frame.number).steps;
            if (frame.next_step < steps.size() && steps[frame.next_step].kind == Rank::Step::send) return &frame;
            if (oldest == nullptr) oldest = &frame;
        }
        limit = frame.next_step;
    }
    return oldest;
}

bool StepExecutor::has_state(const InFlightFrame& frame) const {
    const auto& steps = get_role(frame.number).steps;
    if (frame.next_step == steps.size() || steps[frame.next_step].kind != Rank::Step::load_state) return true;
    return store_counts_[steps[frame.next_step].index] == frame.number;
}

bool StepExecutor::is_short(const InFlightFrame& frame) const {
    const auto role = frame.number % roles_.size();
    const auto& seconds = last_seconds_[role];
    return frames_.size() == 1 &&
           (frame.next_step == seconds.size() || seconds[frame.next_step] < short_steps_s_[role]);
}

void StepExecutor::schedule_next() {
    if (is_busy_) return;
    const auto* frame = find_ready_frame();
    const bool waits = frame == nullptr && !frames_.empty();
    TimelineEntry next{"wait", -1, 0, Clock::now(), {}};
    if (waits) {
        const auto& oldest = frames_.front();
        const auto missing = find_missing_receive(oldest);
        if (missing < oldest.received.size()) next.index = get_role(oldest.number).receives[missing].transfer;
        next.frame = oldest.number;
    }
    const bool same = waits && next.index == wait_.index && next.frame == wait_.frame;
    if (is_waiting_ && !same) {
        wait_.end = next.start;
        times_.wait += std::chrono::duration<double>(wait_.end - wait_.start).count();
        if (is_recorded_) times_.timeline.push_back(wait_);
    }
    if (!is_waiting_ || !same) {
        wait_ = next;
        is_recorded_ = waits && frames_.back().number == last_frame_;
    }
    is_waiting_ = waits;
    if (frame != nullptr) (is_short(*frame) ? events_available_ : work_available_).notify_one();
}

void StepExecutor::run_worker() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!is_stopping_ && !failure_) {
        auto* frame = is_busy_ ? nullptr : find_ready_frame();
        if (frame == nullptr || is_short(*frame)) {
            work_available_.wait(lock);
        } else {
            advance(lock, *frame);
        }
    }
}

void StepExecutor::advance(std::unique_lock<std::mutex>& lock, InFlightFrame& frame) {
    const auto number = frame.number;
    const auto& rank = get_role(number);
    if (frame.next_step == rank.steps.size()) {
        pending_events_.executed_frames.push_back(number);
        const auto has_number = [&](const InFlightFrame& other) { return other.number == number; };
        frames_.erase(std::find_if(frames_.begin(), frames_.end(), has_number));
        schedule_next();
        return events_available_.notify_one();
    }
    const auto& step = rank.steps[frame.next_step];
    const auto start = Clock::now();
    is_busy_ = true;
    lock.unlock();
    std::exception_ptr failure;
    try {
        auto& tensors = buffers_[number % buffers_.size()]->tensors;
        if (frame.next_step == 0 && !rank.inputs.empty()) inputs_.set_inputs(number, rank.inputs, tensors);
        if (step.kind != Rank::Step::send) execute(step, number);
    } catch (...) {
        failure = std::current_exception();
    }
    lock.lock();
    is_busy_ = false;
    if (step.kind == Rank::Step::store_state) ++store_counts_[rank.stores[step.index].state];
    last_seconds_[number % roles_.size()][frame.next_step] = seconds_since(start);
    if (step.kind == Rank::Step::send && !failure) pending_events_.sends.push_back({number, step.index});
    failure_ = failure;
    ++frame.next_step;  // `frame` is still valid, because a deque does not move its elements when others are appended
    events_available_.notify_one();
    schedule_next();
}

void StepExecutor::execute(const Rank::Step& step, std::size_t frame) {
    auto& buffers = *buffers_[frame % buffers_.size()];
    if (step.kind == Rank::Step::output) {
        const auto& output = get_role(frame).outputs[step.index];
        deliver_(frame, buffers.tensors[output.tensor], output.file);
        return;
    }
    if (step.kind == Rank::Step::load_state) {
        return load_state(get_role(frame).states[step.index], step.index, frame);
    }
    if (step.kind == Rank::Step::store_state) {
        const auto& store = get_role(frame).stores[step.index];
        auto& stored = stored_states_[store.state];
        std::memcpy(stored.data(), buffers.tensors[store.tensor].data, stored.size());
        return;
    }
    const auto start = Clock::now();
    const auto segment = first_segments_[frame % roles_.size()] + step.index;
    if (times_.compute_starts[frame] == Clock::time_point{}) times_.compute_starts[frame] = start;
    const auto is_delayed = segment < min_seconds_.size() && min_seconds_[segment] > 0;
    if (is_delayed) set_scheduling(SCHED_IDLE);
    const auto& run = get_role(frame).runs[step.index];
    const auto& tensors = buffers.tensors;
    for (const auto& entry : run.input_copies) copy(entry.strided, tensors[entry.source], tensors[entry.target]);
    if (buffers.segments[step.index]) buffers.segments[step.index]->run();
    for (const auto& entry : run.output_copies) copy(entry.strided, tensors[entry.source], tensors[entry.target]);
    if (is_delayed) {
        set_scheduling(SCHED_OTHER);
        const std::chrono::duration<double> minimum(min_seconds_[segment]);
        wait_until(start + std::chrono::duration_cast<Clock::duration>(minimum));
    }
    const auto end = Clock::now();
    times_.segments[segment] += std::chrono::duration<double>(end - start).count();
    if (frame == last_frame_) times_.timeline.push_back({"run", static_cast<long>(segment), frame, start, end});
}

void StepExecutor::load_state(const Rank::State& state, std::size_t index, std::size_t frame) {
    auto& tensor = buffers_[frame % buffers_.size()]->tensors[state.tensor];
    if (inputs_.set_initial_state(frame, state, tensor)) return;
    const auto& stored = stored_states_[index];  // zeros before the first frame
    std::memcpy(tensor.data, stored.data(), stored.size());
}

}  // namespace dicompiler
