#include "samples.hpp"

#include <algorithm>
#include <cstring>
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

// Copies the piece of an array that begins there and is as large as the tensor, row by row.
void copy_piece(const Array& whole, const Shape& from, Tensor& tensor) {
    const auto& size = tensor.shape;
    const auto rank = size.size(), width = size_of(tensor.type);
    const auto row = (rank == 0 ? 1 : static_cast<std::size_t>(size.back())) * width;
    Shape at(rank, 0);
    auto* out = static_cast<char*>(tensor.data);
    for (auto* const end = out + tensor.bytes(); out < end; out += row) {
        std::size_t place = 0;
        for (std::size_t i = 0; i < rank; ++i) {
            place = place * static_cast<std::size_t>(whole.shape[i]) + static_cast<std::size_t>(from[i] + at[i]);
        }
        std::memcpy(out, static_cast<const char*>(whole.data.get()) + place * width, row);
        for (std::size_t i = rank; i-- > 1;) {  // the next row: all axes but the last count up
            if (++at[i - 1] < size[i - 1]) break;
            at[i - 1] = 0;
        }
    }
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

bool Samples::begin(std::size_t frame, const Rank::State& state, Tensor& tensor) {
    if (files_.empty()) return false;
    const auto& file = files_[frame % files_.size()];
    if (file != last_) read(file);
    const auto given = [&](const Input& one) { return arrays_.count(one.name) != 0; };
    if (std::none_of(program_.states.begin(), program_.states.end(), given)) return false;
    const auto found = arrays_.find(program_.states[state.index].name);
    if (found == arrays_.end()) {
        std::memset(tensor.data, 0, tensor.bytes());
    } else {
        copy_piece(found->second, state.from, tensor);
    }
    return true;
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
    for (const auto& entry : arrays_) {
        const auto same = [&](const Input& input) { return input.name == entry.first; };
        const auto state = std::find_if(program_.states.begin(), program_.states.end(), same);
        if (state != program_.states.end()) {
            check(*state, entry.second, file);
        } else if (std::none_of(program_.inputs.begin(), program_.inputs.end(), same)) {
            throw Error(file + ": the network has no input '" + entry.first + "'");
        }
    }
    last_ = file;
}

}  // namespace dicompiler
