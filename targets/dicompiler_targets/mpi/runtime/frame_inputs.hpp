// Reads the inputs of a run from a file or from a directory. Each frame (inference request) uses the next file of the
// directory. After the last file, the first one follows.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "program.hpp"

namespace dicompiler {

// An .npz file has all inputs by name; an .npy file or an image is only for networks with one input. Throws Error with
// the file's name if an input has a wrong type or shape.
class FrameInputs {
public:
    // `path` is a file or directory; it is empty if this rank reads no input.
    FrameInputs(const Program& program, const std::string& path);

    std::size_t file_count() const { return files_.size(); }
    // Lets the tensors of `inputs` refer to the arrays that were read from the frame's file, without a copy.
    void set_inputs(std::size_t frame, const std::vector<Rank::Input>& inputs, std::vector<Tensor>& tensors);
    // Sets a state (a tensor that a rank keeps for the next frame) to the value in the frame's file, or to zero if the
    // file has only other states. Returns false if the file has no states.
    bool set_initial_state(std::size_t frame, const Rank::State& state, Tensor& tensor);

private:
    void read(const std::string& file);

    const Program& program_;
    std::vector<std::string> files_;
    std::string last_file_;
    std::map<std::string, Array> arrays_;
};

}  // namespace dicompiler
