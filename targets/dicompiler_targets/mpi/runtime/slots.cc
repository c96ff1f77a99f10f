#include "slots.hpp"

#include <algorithm>

namespace dicompiler {
namespace {

// The first and the last step at which a tensor is held; step 0 is the start of a frame.
struct Span {
    std::size_t first, last;
};

std::vector<Span> spans(const Rank& rank) {
    std::vector<Span> found(rank.tensors.size(), {0, 0});
    for (std::size_t i = 0; i < rank.steps.size(); ++i) {
        const auto& step = rank.steps[i];
        if (step.kind == Rank::Step::run) {
            const auto& run = rank.runs[step.index];
            for (const auto id : run.inputs) found[id].last = std::max(found[id].last, i + 1);
            for (const auto& join : run.joins) found[join.source].last = std::max(found[join.source].last, i + 1);
            for (const auto id : run.outputs) found[id] = {i + 1, i + 1};
            for (const auto& cut : run.cuts) {
                found[cut.source].last = std::max(found[cut.source].last, i + 1);
                found[cut.target] = {i + 1, i + 1};
            }
        } else if (step.kind == Rank::Step::take) {
            found[rank.states[step.index].tensor] = {i + 1, i + 1};
        } else if (step.kind == Rank::Step::keep) {
            auto& last = found[rank.keeps[step.index].tensor].last;
            last = std::max(last, i + 1);
        } else {
            const bool sent = step.kind == Rank::Step::send;
            const auto id = sent ? rank.sends[step.index].tensor : rank.outputs[step.index].tensor;
            found[id].last = rank.steps.size() + 1;
        }
    }
    return found;
}

// Bytes that a tensor takes beside others.
std::size_t taken(const Tensor& tensor) { return (tensor.bytes() / ALIGN + 1) * ALIGN; }

// Places what is joined for each segment, one after another.
void place_joined(const Rank& rank, Layout& layout) {
    for (const auto& run : rank.runs) {
        std::size_t at = 0;
        for (const auto& join : run.joins) {
            if (layout.joins[join.target]) continue;
            layout.joins[join.target] = true;
            layout.offsets[join.target] = at;
            at += taken(rank.tensors[join.target]);
        }
        layout.joined = std::max(layout.joined, at);
    }
}

}  // namespace

Layout lay_out(const Rank& rank) {
    const auto held = spans(rank);
    const auto all = rank.tensors.size();
    Layout layout{std::vector<std::size_t>(all, 0), 0, 0, std::vector<bool>(all, false)};
    place_joined(rank, layout);
    std::vector<std::size_t> order, placed;
    for (std::size_t id = 0; id < all; ++id) {
        if (rank.tensors[id].fixed && !layout.joins[id]) order.push_back(id);
    }
    // Large ones first, each at the lowest place that is free for as long as it is held.
    std::stable_sort(order.begin(), order.end(),
                     [&](auto a, auto b) { return rank.tensors[a].bytes() > rank.tensors[b].bytes(); });
    for (const auto id : order) {
        const auto size = taken(rank.tensors[id]);
        std::size_t at = 0;
        for (const auto other : placed) {  // by their offsets
            if (held[other].first > held[id].last || held[other].last < held[id].first) continue;
            if (at + size <= layout.offsets[other]) break;
            at = std::max(at, layout.offsets[other] + taken(rank.tensors[other]));
        }
        layout.offsets[id] = at;
        layout.bytes = std::max(layout.bytes, at + size);
        placed.insert(std::upper_bound(placed.begin(), placed.end(), at,
                                       [&](auto value, auto other) { return value < layout.offsets[other]; }),
                      id);
    }
    return layout;
}

std::vector<std::unique_ptr<Slot>> make_slots(const std::vector<Rank>& roles, std::size_t count,
                                              const std::vector<std::vector<Segment*>>& segments) {
    std::vector<Layout> layouts;
    std::size_t joined = 0;
    for (const auto& role : roles) {
        layouts.push_back(lay_out(role));
        joined = std::max(joined, layouts.back().joined);
    }
    const auto shared = allocate(joined);
    std::vector<std::unique_ptr<Slot>> slots;
    while (slots.size() < count || slots.size() % roles.size() != 0) {
        const auto number = slots.size() % roles.size();
        const auto& rank = roles[number];
        slots.push_back(std::make_unique<Slot>());
        auto& slot = *slots.back();
        slot.memory = allocate(layouts[number].bytes);
        slot.joined = shared;
        slot.tensors = rank.tensors;
        for (std::size_t id = 0; id < slot.tensors.size(); ++id) {
            if (!slot.tensors[id].fixed) continue;
            auto* const memory = (layouts[number].joins[id] ? slot.joined : slot.memory).get();
            slot.tensors[id].data = static_cast<char*>(memory) + layouts[number].offsets[id];
        }
        for (std::size_t k = 0; k < rank.runs.size(); ++k) {
            std::vector<Tensor*> read, made;
            for (const auto id : rank.runs[k].inputs) read.push_back(&slot.tensors[id]);
            for (const auto id : rank.runs[k].outputs) made.push_back(&slot.tensors[id]);
            auto* const segment = segments[number][k];
            slot.calls.push_back(segment == nullptr ? nullptr : segment->bind(read, made));
        }
    }
    return slots;
}

}  // namespace dicompiler
