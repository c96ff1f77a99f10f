// The description of a generated program. main() of the program describes the work of each rank (MPI process), and
// run_program() executes it.
#pragma once

#include <string>
#include <vector>

#include "image.hpp"
#include "tensor.hpp"

namespace dicompiler {

// The work of one rank for a frame (an inference request). Functions of the generated program describe it by calls of
// the member functions. A tensor is identified by its index in `tensors`.
//
// For each frame in flight, all receives are posted first (MPI_Irecv). Then the steps are executed in order. A segment
// runs as soon as its inputs have been received and copied, and sends do not block (MPI_Isend).
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

    // Declares an input of the network that this rank reads. `index` is its index in Program::inputs.
    Id input(std::size_t index, const std::string& name);
    // Declares a state (a tensor that this rank keeps for the next frame) or a piece of it, which begins at the indices
    // `start` of the whole state. `index` is the state's index in Program::states. load_state() reads the value that
    // store_state() has stored for the previous frame.
    Id state(std::size_t index, const std::string& name, Type type, const Shape& shape, const Shape& start);
    void load_state(Id state);
    void store_state(Id tensor, Id state);
    // Declares a tensor that rank `sender` sends for every frame. `transfer` is its index on both ranks.
    Id receive(int transfer, const std::string& name, Type type, const Shape& shape, int sender);
    // Declares a tensor that a segment computes. Without type and shape, the segment sets both when it runs.
    Id tensor(const std::string& name, Type type, const Shape& shape);
    Id tensor(const std::string& name);
    // The following functions add steps in order. run() computes the segment in `file`, a file in the directory of the
    // rank's device. If `file` is "", run() only makes the copies.
    void run(const std::string& file, const std::vector<Id>& inputs, const std::vector<Id>& outputs);
    // Adds a copy that is made before the next run().
    void copy_input(const Copy& copy);
    // Adds a copy that is made after the previous run().
    void copy_output(const Copy& copy);
    void send(int transfer, Id tensor, int receiver);
    // Delivers an output of the network. For each frame, it is written to a file with the name suffix `file`.
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

// A device of the platform; its rank is its index in Program::ranks. A role is the normal plan, a replica or a failure
// plan, and has a function that describes the work of the rank. If n roles are used, role i mod n executes frame i.
struct Device {
    std::string name, host;
    int threads;
    bool gpu;
    std::vector<void (*)(Rank&)> roles;
};

// Returns the work of the device's rank in each of its roles.
std::vector<Rank> describe(const Device& device);

// An input of the network. `fixed` is true if its shape is known.
struct Input {
    std::string name;
    Type type;
    bool fixed;
    Shape shape;
};

struct Program {
    std::vector<Device> ranks;
    std::vector<Input> inputs;
    // The graph optimization level of onnxruntime, and its execution provider for devices that are GPUs.
    std::string optimization, provider;
    ImagePreprocessing preprocessing;
    // The inputs that are states (tensors that a rank keeps for the next frame). An input file may have initial values.
    std::vector<Input> states = {};
    // The number of roles that are used while no device has failed: those of the normal plan and its replicas. 0: all.
    std::size_t regular_roles = 0;
    // The version of ncnn for which segments were converted; "" if ncnn computes none of them.
    std::string ncnn_version = "";
};

// Runs a generated program and returns its exit code. `--help` prints the arguments.
int run_program(const Program& program, int argc, char** argv);

}  // namespace dicompiler
