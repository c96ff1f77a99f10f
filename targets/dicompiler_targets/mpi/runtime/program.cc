#include "program.hpp"

namespace dicompiler {

Rank::Id Rank::input(std::size_t index, const std::string& name) {
    inputs.push_back({index, tensor(name)});
    return inputs.back().tensor;
}

Rank::Id Rank::state(std::size_t index, const std::string& name, Type type, const Shape& shape, const Shape& start) {
    states.push_back({index, tensor(name, type, shape), start});
    return states.back().tensor;
}

std::size_t Rank::find_state(Id state) const {
    std::size_t index = 0;
    while (states.at(index).tensor != state) ++index;
    return index;
}

void Rank::load_state(Id state) { steps.push_back({Step::load_state, find_state(state)}); }

void Rank::store_state(Id tensor, Id state) {
    steps.push_back({Step::store_state, stores.size()});
    stores.push_back({tensor, find_state(state)});
}

Rank::Id Rank::receive(int transfer, const std::string& name, Type type, const Shape& shape, int sender) {
    receives.push_back({transfer, tensor(name, type, shape), sender});
    return receives.back().tensor;
}

Rank::Id Rank::tensor(const std::string& name, Type type, const Shape& shape) {
    const auto id = tensor(name);
    tensors[id].type = type;
    tensors[id].shape = shape;
    tensors[id].fixed = true;
    return id;
}

Rank::Id Rank::tensor(const std::string& name) {
    tensors.emplace_back();
    tensors.back().name = name;
    return tensors.size() - 1;
}

void Rank::run(const std::string& file, const std::vector<Id>& inputs, const std::vector<Id>& outputs) {
    steps.push_back({Step::run, runs.size()});
    runs.push_back({file, inputs, outputs, std::move(pending_input_copies_), {}});
    pending_input_copies_.clear();
}

void Rank::copy_input(const Copy& copy) { pending_input_copies_.push_back(copy); }

void Rank::copy_output(const Copy& copy) { runs.back().output_copies.push_back(copy); }

void Rank::send(int transfer, Id tensor, int receiver) {
    steps.push_back({Step::send, sends.size()});
    sends.push_back({transfer, tensor, receiver});
}

void Rank::output(Id tensor, const std::string& file) {
    steps.push_back({Step::output, outputs.size()});
    outputs.push_back({tensor, file});
}

std::vector<Rank> describe(const Device& device) {
    std::vector<Rank> roles(device.roles.size());
    for (std::size_t i = 0; i < roles.size(); ++i) device.roles[i](roles[i]);
    return roles;
}

}  // namespace dicompiler
