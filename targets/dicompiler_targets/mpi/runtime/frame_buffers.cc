#include "frame_buffers.hpp"

#include <algorithm>

namespace dicompiler {
namespace {

// The numbers of the first and the last step at which a tensor is in memory. Number 0 is the start of a frame.
struct Lifetime {
    std::size_t first, last;
};

std::vector<Lifetime> find_lifetimes(const Rank& rank) {
    std::vector<Lifetime> lifetimes(rank.tensors.size(), {0, 0});
    const auto extend = [&](Rank::Id id, std::size_t step) {
        lifetimes[id].last = std::max(lifetimes[id].last, step);
    };
    for (std::size_t i = 0; i < rank.steps.size(); ++i) {
        const auto& step = rank.steps[i];
        if (step.kind == Rank::Step::run) {
            const auto& run = rank.runs[step.index];
            for (const auto id : run.inputs) extend(id, i + 1);
            for (const auto& copy : run.input_copies) extend(copy.source, i + 1);
            for (const auto id : run.outputs) lifetimes[id] = {i + 1, i + 1};
            for (const auto& copy : run.output_copies) {
                extend(copy.source, i + 1);
                lifetimes[copy.target] = {i + 1, i + 1};
            }
        } else if (step.kind == Rank::Step::load_state) {
            lifetimes[rank.states[step.index].tensor] = {i + 1, i + 1};
        } else if (step.kind == Rank::Step::store_state) {
            extend(rank.stores[step.index].tensor, i + 1);
        } else {
            const bool sends = step.kind == Rank::Step::send;
            const auto id = sends ? rank.sends[step.index].tensor : rank.outputs[step.index].tensor;
            lifetimes[id].last = rank.steps.size() + 1;
        }
    }
    return lifetimes;
}

// Returns the bytes that a tensor occupies, including the gap up to the next aligned address.
std::size_t padded_bytes(const Tensor& tensor) { return (tensor.bytes() / ALIGNMENT_BYTES + 1) * ALIGNMENT_BYTES; }

// Places the inputs of segments that are assembled by copies, one after another in the memory that all frames share.
void place_input_copies(const Rank& rank, BufferLayout& layout) {
    for (const auto& run : rank.runs) {
        std::size_t offset = 0;
        for (const auto& copy : run.input_copies) {
            if (layout.is_input_copy[copy.target]) continue;
            layout.is_input_copy[copy.target] = true;
            layout.offsets[copy.target] = offset;
            offset += padded_bytes(rank.tensors[copy.target]);
        }
        layout.input_copy_bytes = std::max(layout.input_copy_bytes, offset);
    }
}

}  // namespace

BufferLayout make_layout(const Rank& rank) {
    const auto lifetimes = find_lifetimes(rank);
    const auto count = rank.tensors.size();
    BufferLayout layout{std::vector<std::size_t>(count, 0), 0, 0, std::vector<bool>(count, false)};
    place_input_copies(rank, layout);
    std::vector<std::size_t> order, placed;
    for (std::size_t id = 0; id < count; ++id) {
        if (rank.tensors[id].fixed && !layout.is_input_copy[id]) order.push_back(id);
    }
    // Tensors are placed from the largest to the smallest, each at the lowest offset that is free during its lifetime.
    std::stable_sort(order.begin(), order.end(),
                     [&](auto a, auto b) { return rank.tensors[a].bytes() > rank.tensors[b].bytes(); });
    for (const auto id : order) {
        const auto size = padded_bytes(rank.tensors[id]);
        std::size_t offset = 0;
        for (const auto other : placed) {  // sorted by offset
            if (lifetimes[other].first > lifetimes[id].last || lifetimes[other].last < lifetimes[id].first) continue;
            if (offset + size <= layout.offsets[other]) break;
            offset = std::max(offset, layout.offsets[other] + padded_bytes(rank.tensors[other]));
        }
        layout.offsets[id] = offset;
        layout.bytes = std::max(layout.bytes, offset + size);
        placed.insert(std::upper_bound(placed.begin(), placed.end(), offset,
                                       [&](auto value, auto other) { return value < layout.offsets[other]; }),
                      id);
    }
    return layout;
}

std::vector<std::unique_ptr<FrameBuffers>> make_frame_buffers(const std::vector<Rank>& roles, std::size_t count,
                                                              const std::vector<std::vector<Segment*>>& segments) {
    std::vector<BufferLayout> layouts;
    std::size_t input_copy_bytes = 0;
    for (const auto& role : roles) {
        layouts.push_back(make_layout(role));
        input_copy_bytes = std::max(input_copy_bytes, layouts.back().input_copy_bytes);
    }
    const auto input_copy_memory = allocate(input_copy_bytes);
    std::vector<std::unique_ptr<FrameBuffers>> frames;
    while (frames.size() < count || frames.size() % roles.size() != 0) {
        const auto role = frames.size() % roles.size();
        const auto& rank = roles[role];
        const auto& layout = layouts[role];
        frames.push_back(std::make_unique<FrameBuffers>());
        auto& frame = *frames.back();
        frame.memory = allocate(layout.bytes);
        frame.input_copy_memory = input_copy_memory;
        frame.tensors = rank.tensors;
        for (std::size_t id = 0; id < frame.tensors.size(); ++id) {
            if (!frame.tensors[id].fixed) continue;
            auto* const memory = (layout.is_input_copy[id] ? frame.input_copy_memory : frame.memory).get();
            frame.tensors[id].data = static_cast<char*>(memory) + layout.offsets[id];
        }
        for (std::size_t k = 0; k < rank.runs.size(); ++k) {
            std::vector<Tensor*> inputs, outputs;
            for (const auto id : rank.runs[k].inputs) inputs.push_back(&frame.tensors[id]);
            for (const auto id : rank.runs[k].outputs) outputs.push_back(&frame.tensors[id]);
            auto* const segment = segments[role][k];
            frame.segments.push_back(segment == nullptr ? nullptr : segment->bind(inputs, outputs));
        }
    }
    return frames;
}

}  // namespace dicompiler
