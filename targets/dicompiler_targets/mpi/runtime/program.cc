#include "program.hpp"

namespace dicompiler {

Rank::Id Rank::input(std::size_t index, const std::string& name) {
    inputs.push_back({index, tensor(name)});
    return inputs.back().tensor;
}

Rank::Id Rank::state(std::size_t index, const std::string& name, Type type, const Shape& shape, const Shape& from) {
    states.push_back({index, tensor(name, type, shape), from});
    return states.back().tensor;
}

std::size_t Rank::place_of(Id state) const {
    std::size_t place = 0;
    while (states.at(place).tensor != state) ++place;
    return place;
}

void Rank::take(Id state) { steps.push_back({Step::take, place_of(state)}); }

void Rank::keep(Id tensor, Id state) {
    steps.push_back({Step::keep, keeps.size()});
    keeps.push_back({tensor, place_of(state)});
}

Rank::Id Rank::receive(int transfer, const std::string& name, Type type, const Shape& shape, int from) {
    receives.push_back({transfer, tensor(name, type, shape), from});
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

void Rank::run(const std::string& file, const std::vector<Id>& read, const std::vector<Id>& made) {
    steps.push_back({Step::run, runs.size()});
    runs.push_back({file, read, made, std::move(joins_), {}});
    joins_.clear();
}

void Rank::join(const Copy& copy) { joins_.push_back(copy); }

void Rank::cut(const Copy& copy) { runs.back().cuts.push_back(copy); }

void Rank::send(int transfer, Id tensor, int to) {
    steps.push_back({Step::send, sends.size()});
    sends.push_back({transfer, tensor, to});
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
