// The inputs of a run: a file, or a directory whose files are taken in turn, a frame each.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "program.hpp"

namespace dicompiler {

// .npz files hold all inputs by name; .npy files and images are for networks with one input. The same file is not read
// twice in a row, nor checked: inputs that do not fit are an Error that names the file.
class Samples {
public:
    // `path`: empty where this rank is given no input.
    Samples(const Program& program, const std::string& path);

    std::size_t size() const { return files_.size(); }
    // Sets the tensors of inputs to those of a frame.
    void give(std::size_t frame, const std::vector<Rank::Input>& inputs, std::vector<Tensor>& tensors);
    // Sets the piece of a state with which a frame begins anew: its own, zeros where it gives others alone; false where
    // it gives none.
    bool begin(std::size_t frame, const Rank::State& state, Tensor& tensor);

private:
    void read(const std::string& file);

    const Program& program_;
    std::vector<std::string> files_;
    std::string last_;
    std::map<std::string, Array> arrays_;
};

}  // namespace dicompiler
