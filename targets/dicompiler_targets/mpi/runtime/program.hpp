// What a generated program says, and how it is run: main() describes each rank's part, run() plays it with MPI.
#pragma once

#include <string>
#include <vector>

#include "image.hpp"
#include "tensor.hpp"

namespace dicompiler {

// One rank's part of every frame, as its function lists it. The functions name tensors by their place in `tensors`.
//
// For each frame in flight run() posts all receives first (MPI_Irecv), then takes the steps in order: a segment runs as
// soon as what it reads, or is joined for it, was received, sends do not wait (MPI_Isend), and what is still being sent
// at the end of a frame is waited for before its buffers are used again. Buffers of fixed size are laid out once, see
// slots.hpp.
class Rank {
public:
    using Id = std::size_t;
    struct Receive { int transfer; Id tensor; int from; };
    struct Send { int transfer; Id tensor; int to; };
    struct Copy { Id source, target; Box box; };
    struct Run { std::string file; std::vector<Id> inputs, outputs; std::vector<Copy> joins, cuts; };
    struct Input { std::size_t index; Id tensor; };
    struct Output { Id tensor; std::string file; };
    struct State { std::size_t index; Id tensor; Shape from; };
    struct Keep { Id tensor; std::size_t state; };
    struct Step { enum Kind { send, run, output, take, keep } kind; std::size_t index; };

    // An input of the network that is given to this rank; `index` is its place in Program::inputs.
    Id input(std::size_t index, const std::string& name);
    // A piece of a state, from there on in the whole; `index` is its place in Program::states. What one frame keeps, the
    // next one takes.
    Id state(std::size_t index, const std::string& name, Type type, const Shape& shape, const Shape& from);
    void take(Id state);
    void keep(Id tensor, Id state);
    // What another rank sends for every frame.
    Id receive(int transfer, const std::string& name, Type type, const Shape& shape, int from);
    // What a segment makes here; without type and shape where these are known only when it is made.
    Id tensor(const std::string& name, Type type, const Shape& shape);
    Id tensor(const std::string& name);
    // The steps, in order. Files lie in the directory of the rank's device; "": nothing is computed.
    void run(const std::string& file, const std::vector<Id>& inputs, const std::vector<Id>& outputs);
    // Before the next run, a piece of what it reads is brought to its place; after the last one, a piece of what leaves.
    void join(const Copy& copy);
    void cut(const Copy& copy);
    void send(int transfer, Id tensor, int to);
    // An output of the network, written to `file` for each frame.
    void output(Id tensor, const std::string& file);

    std::vector<Tensor> tensors;
    std::vector<Input> inputs;
    std::vector<Receive> receives;
    std::vector<Run> runs;
    std::vector<Send> sends;
    std::vector<Output> outputs;
    std::vector<State> states;
    std::vector<Keep> keeps;
    std::vector<Step> steps;

private:
    std::size_t place_of(Id state) const;
    std::vector<Copy> joins_;
};

// A device of the platform: the rank of its place in Program::ranks. It has as many roles as all others, mostly one:
// frame i is played by the function of place i mod n, of those that are for one loss.
struct Device {
    std::string name, host;
    int threads;
    bool gpu;
    std::vector<void (*)(Rank&)> roles;
};

// What a device does in each of its roles.
std::vector<Rank> describe(const Device& device);

// An input of the network; `fixed`: its shape is known.
struct Input {
    std::string name;
    Type type;
    bool fixed;
    Shape shape;
};

struct Program {
    std::vector<Device> ranks;
    std::vector<Input> inputs;
    // ONNX Runtime's level of graph optimisation, and its provider for devices that are GPUs.
    std::string optimization, provider;
    Preprocessing preprocessing;
    // The inputs that are states, which a frame may give for those to begin anew.
    std::vector<Input> states = {};
    // How many of each rank's functions are for when nothing is lost; 0: all.
    std::size_t turns = 0;
};

// main() of a program: its exit code. `--help` says what the arguments are.
int run(const Program& program, int argc, char** argv);

}  // namespace dicompiler
