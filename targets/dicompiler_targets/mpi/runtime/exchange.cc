#include "exchange.hpp"

#include <mpi.h>
#include <sched.h>

#include <algorithm>
#include <utility>

namespace dicompiler {
namespace {

using std::chrono::microseconds;

// The tag of messages with which a sink (a rank that delivers outputs) reports the number of a finished frame. The
// tensors of transfer i are sent with tag i + 1.
constexpr int FRAME_DONE_TAG = 0;
// After an event, an idle rank polls for messages without a pause for SPIN_S seconds, and then once per IDLE_POLL. If
// it expects no message, the interval is NO_REQUESTS_POLL.
constexpr double SPIN_S = 200e-6;
constexpr microseconds IDLE_POLL{50}, NO_REQUESTS_POLL{10000};
// While a segment is computed, polling slows it down. The interval grows from MIN_BUSY_POLL to MAX_BUSY_POLL until a
// message arrives.
constexpr microseconds MIN_BUSY_POLL{50}, MAX_BUSY_POLL{1000};

class MessageExchange {
public:
    MessageExchange(const std::vector<Rank>& roles, const FrameFlow& flow,
                    std::vector<std::unique_ptr<FrameBuffers>>& buffers, StepExecutor& executor)
        : roles_(roles),
          flow_(flow),
          buffers_(buffers),
          executor_(executor),
          open_requests_(buffers.size(), 0),
          is_executed_(buffers.size(), true) {
        MPI_Comm_rank(MPI_COMM_WORLD, &self_);
        is_source_ = contains_self(flow.sources);
        is_sink_ = contains_self(flow.sinks);
        done_counts_.resize(flow.sinks.size(), 0);
        done_messages_.resize(flow.sinks.size(), 0);
        if (is_first_source()) times_.frames.resize(flow.frames, 0);
    }

    ExchangeTimes run(const std::atomic<bool>& stop) {
        start_ = last_event_ = Clock::now();
        for (std::size_t i = 0; is_source_ && i < flow_.sinks.size(); ++i) await_frame_done(i);
        while (finished_ < flow_.frames || !requests_.empty()) {
            if (stop) throw Stopped{};
            bool progressed = begin_next_frame();
            progressed = executor_.run_short_step() || progressed;
            const auto events = executor_.take_events(progressed ? microseconds{0} : choose_timeout());
            for (const auto& send : events.sends) send_tensor(send);
            for (const auto frame : events.executed_frames) finish_frame(frame);
            progressed = poll_requests() || progressed || !events.sends.empty() || !events.executed_frames.empty();
            if (progressed) last_event_ = Clock::now();
            if (seconds_since(start_) > flow_.timeout_s) fail_overdue();
        }
        times_.total = total_;
        times_.start = start_;
        times_.frame_starts = std::move(frame_starts_);
        return times_;
    }

private:
    // An incomplete MPI request for a tensor, or for the message that a sink (a rank that delivers outputs) has
    // finished a frame.
    struct Request {
        enum Kind { receive, send, receive_done, send_done } kind;
        std::size_t frame, index;
        // The frame number that a request of kind send_done sends.
        std::shared_ptr<std::uint64_t> payload = nullptr;
        // The time when a send began.
        Clock::time_point start = {};
    };

    bool contains_self(const std::vector<int>& ranks) const {
        return std::find(ranks.begin(), ranks.end(), self_) != ranks.end();
    }
    std::size_t buffer_index(std::size_t frame) const { return frame % buffers_.size(); }
    bool is_first_source() const { return self_ == flow_.sources.front(); }
    const Rank& get_role(std::size_t frame) const { return roles_[frame % roles_.size()]; }

    void add_request(MPI_Request mpi_request, Request request) {
        mpi_requests_.push_back(mpi_request);
        requests_.push_back(request);
    }

    // Begins the next frame if its buffers are free. Sources wait until fewer than `in_flight` frames are running.
    bool begin_next_frame() {
        if (begun_ == flow_.frames || !is_executed_[buffer_index(begun_)] || open_requests_[buffer_index(begun_)] > 0) {
            return false;
        }
        if (is_source_ && begun_ >= done_frames_ + flow_.in_flight) return false;
        const auto frame = begun_++;
        auto& tensors = buffers_[buffer_index(frame)]->tensors;
        const auto& receives = get_role(frame).receives;
        for (std::size_t i = 0; i < receives.size(); ++i) {
            const auto& receive = receives[i];
            auto& tensor = tensors[receive.tensor];
            MPI_Request request;
            MPI_Irecv(tensor.data, static_cast<int>(tensor.bytes()), MPI_BYTE, receive.sender, receive.transfer + 1,
                      MPI_COMM_WORLD, &request);
            add_request(request, {Request::receive, frame, i});
        }
        open_requests_[buffer_index(frame)] = receives.size();
        is_executed_[buffer_index(frame)] = false;
        if (is_first_source()) frame_starts_.push_back(Clock::now());
        executor_.begin_frame(frame);
        return true;
    }

    void send_tensor(const ExecutorEvents::Send& event) {
        const auto& send = get_role(event.frame).sends[event.send];
        const auto& tensor = buffers_[buffer_index(event.frame)]->tensors[send.tensor];
        const auto start = Clock::now();
        if (open_sends_++ == 0) sending_start_ = start;
        MPI_Request request;
        MPI_Isend(tensor.data, static_cast<int>(tensor.bytes()), MPI_BYTE, send.receiver, send.transfer + 1,
                  MPI_COMM_WORLD, &request);
        add_request(request, {Request::send, event.frame, event.send, nullptr, start});
        ++open_requests_[buffer_index(event.frame)];
        times_.sent_bytes[send.transfer] += tensor.bytes();
    }

    // Records that the last step of a frame has been executed. A sink (a rank that delivers outputs) reports this to
    // all sources, which may then begin another frame.
    void finish_frame(std::size_t frame) {
        is_executed_[buffer_index(frame)] = true;
        if (open_requests_[buffer_index(frame)] == 0) ++finished_;
        for (std::size_t i = 0; is_sink_ && i < flow_.sources.size(); ++i) {
            if (flow_.sources[i] == self_) {
                const auto sink = std::find(flow_.sinks.begin(), flow_.sinks.end(), self_) - flow_.sinks.begin();
                record_frame_done(static_cast<std::size_t>(sink), frame);
                continue;
            }
            MPI_Request request;
            const auto payload = std::make_shared<std::uint64_t>(frame);
            MPI_Isend(payload.get(), 1, MPI_UINT64_T, flow_.sources[i], FRAME_DONE_TAG, MPI_COMM_WORLD, &request);
            add_request(request, {Request::send_done, frame, i, payload});
        }
    }

    void await_frame_done(std::size_t sink) {
        if (flow_.sinks[sink] == self_ || done_counts_[sink] == flow_.frames) return;
        MPI_Request request;
        MPI_Irecv(&done_messages_[sink], 1, MPI_UINT64_T, flow_.sinks[sink], FRAME_DONE_TAG, MPI_COMM_WORLD, &request);
        add_request(request, {Request::receive_done, 0, sink});
    }

    void record_frame_done(std::size_t sink, std::size_t frame) {
        ++done_counts_[sink];
        if (++done_sinks_[frame] < flow_.sinks.size()) return;
        done_sinks_.erase(frame);
        ++done_frames_;
        if (!is_first_source()) return;
        times_.frames[frame] = seconds_since(frame_starts_[frame]);
        total_ = seconds_since(frame_starts_.front());
    }

    // Removes and processes all completed requests. Returns true if there were any.
    bool poll_requests() {
        if (mpi_requests_.empty()) return false;
        completed_indices_.resize(mpi_requests_.size());
        int count = 0;
        MPI_Testsome(static_cast<int>(mpi_requests_.size()), mpi_requests_.data(), &count, completed_indices_.data(),
                     MPI_STATUSES_IGNORE);
        if (count <= 0) return false;
        std::sort(completed_indices_.begin(), completed_indices_.begin() + count);
        std::vector<Request> completed;
        for (int i = count; i-- > 0;) {  // From the last request, so that the indices of the others stay valid.
            const auto index = static_cast<std::size_t>(completed_indices_[static_cast<std::size_t>(i)]);
            completed.push_back(requests_[index]);
            requests_[index] = requests_.back();
            mpi_requests_[index] = mpi_requests_.back();
            requests_.pop_back();
            mpi_requests_.pop_back();
        }
        for (const auto& request : completed) handle_completed(request);
        return true;
    }

    void handle_completed(const Request& request) {
        if (request.kind == Request::receive_done) {
            record_frame_done(request.index, done_messages_[request.index]);
            await_frame_done(request.index);
        } else if (request.kind == Request::receive || request.kind == Request::send) {
            if (request.kind == Request::receive) executor_.receive_completed(request.frame, request.index);
            if (request.kind == Request::send) record_sent(request);
            const auto index = buffer_index(request.frame);
            if (--open_requests_[index] == 0 && is_executed_[index]) ++finished_;
        }
    }

    void record_sent(const Request& request) {
        if (--open_sends_ == 0) times_.send += seconds_since(sending_start_);
        if (request.frame + 1 < flow_.frames) return;
        const auto transfer = get_role(request.frame).sends[request.index].transfer;
        times_.timeline.push_back({"send", transfer, request.frame, request.start, Clock::now()});
    }

    // Returns the time to wait for events of the executor before polling for messages again.
    microseconds choose_timeout() {
        if (mpi_requests_.empty()) return NO_REQUESTS_POLL;
        if (executor_.is_busy()) {
            const microseconds quarter{static_cast<microseconds::rep>(seconds_since(last_event_) * 1e6 / 4)};
            return std::min(std::max(quarter, MIN_BUSY_POLL), MAX_BUSY_POLL);
        }
        if (seconds_since(last_event_) > SPIN_S) return IDLE_POLL;
        sched_yield();
        return microseconds{0};
    }

    [[noreturn]] void fail_overdue() {
        int peer = -1;
        auto state = executor_.describe_state(peer);
        if (state.empty() && is_source_ && done_frames_ < flow_.frames) {
            const auto slowest = std::min_element(done_counts_.begin(), done_counts_.end()) - done_counts_.begin();
            state = "the outputs of frame " + std::to_string(done_frames_) + " did not arrive in time";
            peer = flow_.sinks[static_cast<std::size_t>(slowest)];
        } else if (state.empty()) {
            state = "a tensor that it sends was not received in time";
            for (const auto& request : requests_) {
                if (request.kind == Request::send) peer = get_role(request.frame).sends[request.index].receiver;
            }
        }
        throw Error(state + " (" + std::to_string(finished_) + " of " + std::to_string(flow_.frames) +
                        " frames are done here): allow more time (--timeout)",
                    peer);
    }

    const std::vector<Rank>& roles_;
    const FrameFlow& flow_;
    std::vector<std::unique_ptr<FrameBuffers>>& buffers_;
    StepExecutor& executor_;
    int self_ = 0;
    bool is_source_ = false, is_sink_ = false;
    // The requests that are not complete. Two vectors have the same order, because MPI needs an array of MPI_Request.
    std::vector<MPI_Request> mpi_requests_;
    std::vector<Request> requests_;
    std::vector<int> completed_indices_;
    // For each FrameBuffers: the number of incomplete receives and sends of its frame, and whether the last step of its
    // frame has been executed.
    std::vector<std::size_t> open_requests_;
    std::vector<bool> is_executed_;
    std::size_t begun_ = 0, finished_ = 0, open_sends_ = 0;
    // For each sink: the number of frames that it has finished, and the buffer for its next message.
    std::vector<std::size_t> done_counts_;
    std::vector<std::uint64_t> done_messages_;
    // The number of sinks that have finished a frame, by frame. Replicas finish frames in any order.
    std::map<std::size_t, std::size_t> done_sinks_;
    std::size_t done_frames_ = 0;
    std::vector<Clock::time_point> frame_starts_;
    Clock::time_point start_, last_event_, sending_start_;
    double total_ = 0;
    ExchangeTimes times_;
};

}  // namespace

ExchangeTimes exchange(const std::vector<Rank>& roles, const FrameFlow& flow,
                       std::vector<std::unique_ptr<FrameBuffers>>& buffers, StepExecutor& executor,
                       const std::atomic<bool>& stop) {
    return MessageExchange(roles, flow, buffers, executor).run(stop);
}

void wait_at_barrier() {
    MPI_Request request;
    MPI_Ibarrier(MPI_COMM_WORLD, &request);
    for (int done = 0; done == 0;) {
        MPI_Test(&request, &done, MPI_STATUS_IGNORE);
        if (done == 0) std::this_thread::sleep_for(std::chrono::microseconds{200});
    }
}

}  // namespace dicompiler
