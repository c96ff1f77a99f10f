#include "samples.hpp"

#include <algorithm>
#include <filesystem>

namespace dicompiler {
namespace {

namespace fs = std::filesystem;

bool ends_with(const std::string& path, const std::string& tail) {
    return path.size() >= tail.size() && path.compare(path.size() - tail.size(), tail.size(), tail) == 0;
}

bool is_sample(const std::string& path) {
    return ends_with(path, ".npz") || ends_with(path, ".npy") || is_image(path);
}

void check(const Input& input, const Array& array, const std::string& file) {
    const auto wanted = numpy_name(input.type);
    // A type that numpy lacks is void there, or an unsigned number of its size.
    const bool same = wanted[1] == 'V' ? std::string("Vu").find(array.type[1]) != std::string::npos &&
                                             array.type.substr(2) == wanted.substr(2)
                                       : array.type == wanted;
    if (!same) {
        throw Error(file + ": input '" + input.name + "' must be of type '" + wanted + "', not '" + array.type + "'");
    }
    if (input.fixed && array.shape != input.shape) {
        throw Error(file + ": input '" + input.name + "' must have the shape " + text(input.shape) + ", not " +
                    text(array.shape));
    }
}

}  // namespace

Samples::Samples(const Program& program, const std::string& path) : program_(program) {
    if (path.empty()) return;
    std::error_code code;
    if (!fs::is_directory(path, code)) {
        files_.push_back(path);
    } else {
        for (const auto& entry : fs::directory_iterator(path)) {
            if (is_sample(entry.path().string())) files_.push_back(entry.path().string());
        }
        std::sort(files_.begin(), files_.end());
    }
    if (files_.empty()) throw Error(path + ": no inputs are there: expected .npz, .npy or image files");
    if (!fs::exists(files_[0], code)) throw Error(files_[0] + ": no such file");
    for (const auto& file : files_) {
        if (!is_sample(file)) throw Error(file + ": no input: expected an .npz, .npy or image file");
        if (!ends_with(file, ".npz") && program.inputs.size() != 1) {
            throw Error(file + ": the network has " + std::to_string(program.inputs.size()) +
                        " inputs: give them by name in an .npz file");
        }
    }
}

void Samples::give(std::size_t frame, const std::vector<Rank::Input>& inputs, std::vector<Tensor>& tensors) {
    const auto& file = files_[frame % files_.size()];
    if (file != last_) read(file);
    for (const auto& input : inputs) {
        const auto& array = arrays_.at(program_.inputs[input.index].name);
        auto& tensor = tensors[input.tensor];
        tensor.type = program_.inputs[input.index].type;
        tensor.shape = array.shape;
        tensor.data = array.data.get();
        tensor.owner = array.data;
    }
}

void Samples::read(const std::string& file) {
    arrays_.clear();
    last_.clear();
    if (ends_with(file, ".npz")) {
        arrays_ = read_npz(file);
    } else if (ends_with(file, ".npy")) {
        arrays_[program_.inputs[0].name] = read_npy(file);
    } else {
        const auto& input = program_.inputs[0];
        const bool fits = input.fixed && input.type == Type::float32 && input.shape.size() == 4 &&
                          input.shape[0] == 1 && input.shape[1] == (program_.preprocessing.order == "GRAY" ? 1 : 3);
        if (!fits) {
            throw Error(file + ": input '" + input.name + "' " + text(input.shape) + " is not one image in " +
                        program_.preprocessing.order + ": give it as .npy, or compile with another channel order");
        }
        arrays_[input.name] = read_image(file, input.shape, program_.preprocessing);
    }
    for (const auto& input : program_.inputs) {
        if (arrays_.count(input.name) == 0) throw Error(file + ": input '" + input.name + "' is missing");
        check(input, arrays_.at(input.name), file);
    }
    if (arrays_.size() > program_.inputs.size()) {
        for (const auto& entry : arrays_) {
            const auto known = std::find_if(program_.inputs.begin(), program_.inputs.end(),
                                            [&](const Input& input) { return input.name == entry.first; });
            if (known == program_.inputs.end()) throw Error(file + ": the network has no input '" + entry.first + "'");
        }
    }
    last_ = file;
}

}  // namespace dicompiler
