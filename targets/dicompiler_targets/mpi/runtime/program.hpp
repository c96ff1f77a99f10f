// The description of a generated program, and how it is run: main() describes each rank's part, run_program() executes
// it with MPI.
#pragma once

#include <string>
#include <vector>

#include "image.hpp"
#include "tensor.hpp"

namespace dicompiler {

// One rank's part of every frame, as its function lists it. The functions refer to tensors by their index in `tensors`.
//
// For each frame in flight, all receives are posted first (MPI_Irecv). Then the steps are executed in order: a segment
// runs as soon as its inputs have been received and copied, and sends do not block (MPI_Isend). Buffers are used again
// only when all sends of their frame are complete. Buffers of fixed size are laid out once, see frame_buffers.hpp.
class Rank {
public:
    using Id = std::size_t;
    struct Receive { int transfer; Id tensor; int sender; };
    struct Send { int transfer; Id tensor; int receiver; };
    struct Copy { Id source, target; StridedCopy strided; };
    struct Run { std::string file; std::vector<Id> inputs, outputs; std::vector<Copy> input_copies, output_copies; };
    struct Input { std::size_t index; Id tensor; };
    struct Output { Id tensor; std::string file; };
    struct State { std::size_t index; Id tensor; Shape start; };
    struct StateStore { Id tensor; std::size_t state; };
    struct Step { enum Kind { send, run, output, load_state, store_state } kind; std::size_t index; };

    // Declares an input of the network that this rank reads. `index`: its place in Program::inputs.
    Id input(std::size_t index, const std::string& name);
    // Declares a piece of a state, which begins at `start` in the whole state. `index`: its place in Program::states.
    // load_state() reads what store_state() has stored for the previous frame.
    Id state(std::size_t index, const std::string& name, Type type, const Shape& shape, const Shape& start);
    void load_state(Id state);
    void store_state(Id tensor, Id state);
    // Declares a tensor that another rank sends for every frame.
    Id receive(int transfer, const std::string& name, Type type, const Shape& shape, int sender);
    // Declares a tensor that a segment computes. Without type and shape, they are known only after the segment's run.
    Id tensor(const std::string& name, Type type, const Shape& shape);
    Id tensor(const std::string& name);
    // The following functions add steps in order. A segment's file lies in the directory of the rank's device; "" makes
    // only the copies.
    void run(const std::string& file, const std::vector<Id>& inputs, const std::vector<Id>& outputs);
    // Adds a copy into an input of the next run.
    void copy_input(const Copy& copy);
    // Adds a copy out of an output of the previous run.
    void copy_output(const Copy& copy);
    void send(int transfer, Id tensor, int receiver);
    // Delivers an output of the network, which is written to `file` for each frame.
    void output(Id tensor, const std::string& file);

    std::vector<Tensor> tensors;
    std::vector<Input> inputs;
    std::vector<Receive> receives;
    std::vector<Run> runs;
    std::vector<Send> sends;
    std::vector<Output> outputs;
    std::vector<State> states;
    std::vector<StateStore> stores;
    std::vector<Step> steps;

private:
    std::size_t find_state(Id state) const;
    std::vector<Copy> pending_input_copies_;
};

// A device of the platform; its rank is its index in Program::ranks. All devices have the same number of roles, usually
// one. Of the roles that are in use, frame i is executed by role i mod n.
struct Device {
    std::string name, host;
    int threads;
    bool gpu;
    std::vector<void (*)(Rank&)> roles;
};

// Returns the device's part in each of its roles.
std::vector<Rank> describe(const Device& device);

// An input of the network. `fixed`: its shape is known.
struct Input {
    std::string name;
    Type type;
    bool fixed;
    Shape shape;
};

struct Program {
    std::vector<Device> ranks;
    std::vector<Input> inputs;
    // ONNX Runtime's graph optimization level, and its execution provider for devices that are GPUs.
    std::string optimization, provider;
    ImagePreprocessing preprocessing;
    // The inputs that are states. A frame that gives them sets the states to these values.
    std::vector<Input> states = {};
    // The number of roles that are in use while no device has failed; 0: all.
    std::size_t regular_roles = 0;
};

// The main function of a generated program. Returns its exit code; `--help` lists the arguments.
int run_program(const Program& program, int argc, char** argv);

}  // namespace dicompiler
