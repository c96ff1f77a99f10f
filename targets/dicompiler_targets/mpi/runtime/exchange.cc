#include "exchange.hpp"

#include <mpi.h>
#include <sched.h>

#include <algorithm>
#include <utility>

namespace dicompiler {
namespace {

using std::chrono::microseconds;

// Tag of the messages by which enders say that a frame is done: its number. Transfer i has tag i + 1.
constexpr int DONE = 0;
// How long a rank that has nothing to do looks for messages all the time, and how often it looks afterwards.
constexpr double EAGER_S = 200e-6;
constexpr microseconds IDLE{50}, UNCONNECTED{10000};
// How often it looks while it computes, for each look interrupts that: the longer nothing has come, the less.
constexpr microseconds OFTEN{50}, SELDOM{1000};

class Exchange {
public:
    Exchange(const std::vector<Rank>& roles, const Flow& flow, std::vector<std::unique_ptr<Slot>>& slots,
             Player& player)
        : roles_(roles),
          flow_(flow),
          slots_(slots),
          player_(player),
          left_(slots.size(), 0),
          played_(slots.size(), true) {
        MPI_Comm_rank(MPI_COMM_WORLD, &self_);
        starts_ = has(flow.starters);
        ends_ = has(flow.enders);
        done_.resize(flow.enders.size(), 0);
        heard_.resize(flow.enders.size(), 0);
        if (leads()) measured_.frames.resize(flow.frames, 0);
    }

    Measured run(const std::atomic<bool>& stop) {
        start_ = moved_ = Clock::now();
        for (std::size_t i = 0; starts_ && i < flow_.enders.size(); ++i) await_done(i);
        while (finished_ < flow_.frames || !requests_.empty()) {
            if (stop) throw Stopped{};
            bool moved = admit();
            moved = player_.help() || moved;
            const auto news = player_.take(moved ? microseconds{0} : patience());
            for (const auto& one : news.sends) send(one);
            for (const auto frame : news.played) end(frame);
            moved = test() || moved || !news.sends.empty() || !news.played.empty();
            if (moved) moved_ = Clock::now();
            if (since(start_) > flow_.timeout) overdue();
        }
        measured_.total = total_;
        measured_.start = start_;
        measured_.begun = std::move(starts_at_);
        return measured_;
    }

private:
    // What a request is: a receive or a send of a frame, or word (in or out) that a frame is done.
    struct What {
        enum Kind { receive, send, done_in, done_out } kind;
        std::size_t frame, index;
        // The message of done_out.
        std::shared_ptr<std::uint64_t> word = nullptr;
        // When a send began.
        Clock::time_point since = {};
    };

    bool has(const std::vector<int>& ranks) const {
        return std::find(ranks.begin(), ranks.end(), self_) != ranks.end();
    }
    std::size_t slot(std::size_t frame) const { return frame % slots_.size(); }
    bool leads() const { return self_ == flow_.starters.front(); }
    const Rank& role(std::size_t frame) const { return roles_[frame % roles_.size()]; }

    void add(MPI_Request request, What what) {
        requests_.push_back(request);
        what_.push_back(what);
    }

    // Begins the next frame if its slot is free and, where this rank begins by itself, if few enough are on their way.
    bool admit() {
        if (begun_ == flow_.frames || !played_[slot(begun_)] || left_[slot(begun_)] > 0) return false;
        if (starts_ && begun_ >= all_done_ + flow_.in_flight) return false;
        const auto frame = begun_++;
        auto& tensors = slots_[slot(frame)]->tensors;
        const auto& receives = role(frame).receives;
        for (std::size_t i = 0; i < receives.size(); ++i) {
            const auto& one = receives[i];
            MPI_Request request;
            MPI_Irecv(tensors[one.tensor].data, static_cast<int>(tensors[one.tensor].bytes()), MPI_BYTE, one.from,
                      one.transfer + 1, MPI_COMM_WORLD, &request);
            add(request, {What::receive, frame, i});
        }
        left_[slot(frame)] = receives.size();
        played_[slot(frame)] = false;
        if (leads()) starts_at_.push_back(Clock::now());
        player_.begin(frame);
        return true;
    }

    void send(const News::Sending& one) {
        const auto& send = role(one.frame).sends[one.send];
        const auto& tensor = slots_[slot(one.frame)]->tensors[send.tensor];
        const auto begun = Clock::now();
        if (sending_++ == 0) sending_since_ = begun;
        MPI_Request request;
        MPI_Isend(tensor.data, static_cast<int>(tensor.bytes()), MPI_BYTE, send.to, send.transfer + 1, MPI_COMM_WORLD,
                  &request);
        add(request, {What::send, one.frame, one.send, nullptr, begun});
        ++left_[slot(one.frame)];
        measured_.sent[send.transfer] += tensor.bytes();
    }

    // The last step of a frame was played.
    void end(std::size_t frame) {
        played_[slot(frame)] = true;
        if (left_[slot(frame)] == 0) ++finished_;
        for (std::size_t i = 0; ends_ && i < flow_.starters.size(); ++i) {
            if (flow_.starters[i] == self_) {
                const auto place = std::find(flow_.enders.begin(), flow_.enders.end(), self_) - flow_.enders.begin();
                note_done(static_cast<std::size_t>(place), frame);
                continue;
            }
            MPI_Request request;
            const auto word = std::make_shared<std::uint64_t>(frame);
            MPI_Isend(word.get(), 1, MPI_UINT64_T, flow_.starters[i], DONE, MPI_COMM_WORLD, &request);
            add(request, {What::done_out, frame, i, word});
        }
    }

    void await_done(std::size_t ender) {
        if (flow_.enders[ender] == self_ || done_[ender] == flow_.frames) return;
        MPI_Request request;
        MPI_Irecv(&heard_[ender], 1, MPI_UINT64_T, flow_.enders[ender], DONE, MPI_COMM_WORLD, &request);
        add(request, {What::done_in, 0, ender});
    }

    void note_done(std::size_t ender, std::size_t frame) {
        ++done_[ender];
        if (++enders_done_[frame] < flow_.enders.size()) return;
        enders_done_.erase(frame);
        ++all_done_;
        if (!leads()) return;
        measured_.frames[frame] = since(starts_at_[frame]);
        total_ = since(starts_at_.front());
    }

    // Looks what has been received and sent.
    bool test() {
        if (requests_.empty()) return false;
        places_.resize(requests_.size());
        int count = 0;
        MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &count, places_.data(), MPI_STATUSES_IGNORE);
        if (count <= 0) return false;
        std::sort(places_.begin(), places_.begin() + count);
        std::vector<What> complete;
        for (int i = count; i-- > 0;) {  // from the end, so that the places before stay right
            const auto place = static_cast<std::size_t>(places_[static_cast<std::size_t>(i)]);
            complete.push_back(what_[place]);
            what_[place] = what_.back();
            requests_[place] = requests_.back();
            what_.pop_back();
            requests_.pop_back();
        }
        for (const auto& one : complete) handle(one);
        return true;
    }

    void handle(const What& one) {
        if (one.kind == What::done_in) {
            note_done(one.index, heard_[one.index]);
            await_done(one.index);
        } else if (one.kind == What::receive || one.kind == What::send) {
            if (one.kind == What::receive) player_.arrived(one.frame, one.index);
            if (one.kind == What::send) sent(one);
            if (--left_[slot(one.frame)] == 0 && played_[slot(one.frame)]) ++finished_;
        }
    }

    void sent(const What& one) {
        if (--sending_ == 0) measured_.send += since(sending_since_);
        if (one.frame + 1 < flow_.frames) return;
        const auto transfer = role(one.frame).sends[one.index].transfer;
        measured_.spans.push_back({"send", transfer, one.frame, one.since, Clock::now()});
    }

    // How long to wait for news of the player before looking for messages again.
    microseconds patience() {
        if (requests_.empty()) return UNCONNECTED;
        if (player_.busy()) {
            const microseconds quarter{static_cast<microseconds::rep>(since(moved_) * 1e6 / 4)};
            return std::min(std::max(quarter, OFTEN), SELDOM);
        }
        if (since(moved_) > EAGER_S) return IDLE;
        sched_yield();
        return microseconds{0};
    }

    [[noreturn]] void overdue() {
        int peer = -1;
        auto state = player_.state(peer);
        if (state.empty() && starts_ && all_done_ < flow_.frames) {
            const auto late = std::min_element(done_.begin(), done_.end()) - done_.begin();
            state = "the outputs of frame " + std::to_string(all_done_) + " did not come in time";
            peer = flow_.enders[static_cast<std::size_t>(late)];
        } else if (state.empty()) {
            state = "what it sends was not received in time";
            for (const auto& one : what_) peer = one.kind == What::send ? role(one.frame).sends[one.index].to : peer;
        }
        throw Error(state + " (" + std::to_string(finished_) + " of " + std::to_string(flow_.frames) +
                        " frames are done here): allow more time (--timeout)",
                    peer);
    }

    const std::vector<Rank>& roles_;
    const Flow& flow_;
    std::vector<std::unique_ptr<Slot>>& slots_;
    Player& player_;
    int self_ = 0;
    bool starts_ = false, ends_ = false;
    std::vector<MPI_Request> requests_;
    std::vector<What> what_;
    std::vector<int> places_;
    // Of each slot: receives and sends that are not complete, and whether its frame's last step was played.
    std::vector<std::size_t> left_;
    std::vector<bool> played_;
    std::size_t begun_ = 0, finished_ = 0, sending_ = 0;
    // Of each ender: how many frames it has done, and which it has told of last.
    std::vector<std::size_t> done_;
    std::vector<std::uint64_t> heard_;
    // Of frames that some enders have done: how many have. With several roles frames end in any order.
    std::map<std::size_t, std::size_t> enders_done_;
    std::size_t all_done_ = 0;
    std::vector<Clock::time_point> starts_at_;
    Clock::time_point start_, moved_, sending_since_;
    double total_ = 0;
    Measured measured_;
};

}  // namespace

Measured exchange(const std::vector<Rank>& roles, const Flow& flow, std::vector<std::unique_ptr<Slot>>& slots,
                  Player& player, const std::atomic<bool>& stop) {
    return Exchange(roles, flow, slots, player).run(stop);
}

void barrier() {
    MPI_Request request;
    MPI_Ibarrier(MPI_COMM_WORLD, &request);
    for (int done = 0; done == 0;) {
        MPI_Test(&request, &done, MPI_STATUS_IGNORE);
        if (done == 0) std::this_thread::sleep_for(std::chrono::microseconds{200});
    }
}

}  // namespace dicompiler
