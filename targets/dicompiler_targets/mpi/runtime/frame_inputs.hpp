// Reads the inputs of a run: one file, or a directory whose files are used in turn, one for each frame.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "program.hpp"

namespace dicompiler {

// .npz files hold all inputs by name. .npy files and images are for networks with one input. A file that is used twice
// in a row is read and checked once. Inputs of the wrong type or shape are an Error that names the file.
class FrameInputs {
public:
    // `path`: empty if this rank reads no input.
    FrameInputs(const Program& program, const std::string& path);

    std::size_t file_count() const { return files_.size(); }
    // Sets the tensors to the inputs of the frame.
    void set_inputs(std::size_t frame, const std::vector<Rank::Input>& inputs, std::vector<Tensor>& tensors);
    // Sets the piece of a state to the frame's initial value, and returns true, if the frame gives any state. States
    // that it does not give become zeros.
    bool set_initial_state(std::size_t frame, const Rank::State& state, Tensor& tensor);

private:
    void read(const std::string& file);

    const Program& program_;
    std::vector<std::string> files_;
    std::string last_file_;
    std::map<std::string, Array> arrays_;
};

}  // namespace dicompiler
