#include "frame_inputs.hpp"

#include <algorithm>
#include <cstring>
#include <filesystem>

namespace dicompiler {
namespace {

namespace fs = std::filesystem;

bool ends_with(const std::string& path, const std::string& suffix) {
    return path.size() >= suffix.size() && path.compare(path.size() - suffix.size(), suffix.size(), suffix) == 0;
}

bool is_input_file(const std::string& path) {
    return ends_with(path, ".npz") || ends_with(path, ".npy") || is_image(path);
}

// Copies a region of an array into the tensor, row by row. The region begins at the indices `start`, and has the
// tensor's shape.
void copy_piece(const Array& whole, const Shape& start, Tensor& tensor) {
    const auto& shape = tensor.shape;
    const auto rank = shape.size(), item_bytes = size_of(tensor.type);
    const auto row_bytes = (rank == 0 ? 1 : static_cast<std::size_t>(shape.back())) * item_bytes;
    Shape index(rank, 0);
    auto* out = static_cast<char*>(tensor.data);
    for (auto* const end = out + tensor.bytes(); out < end; out += row_bytes) {
        std::size_t element = 0;
        for (std::size_t i = 0; i < rank; ++i) {
            element *= static_cast<std::size_t>(whole.shape[i]);
            element += static_cast<std::size_t>(start[i] + index[i]);
        }
        std::memcpy(out, static_cast<const char*>(whole.data.get()) + element * item_bytes, row_bytes);
        for (std::size_t i = rank; i-- > 1;) {  // go to the next row: increment the index like a number
            if (++index[i - 1] < shape[i - 1]) break;
            index[i - 1] = 0;
        }
    }
}

void check_array(const Input& input, const Array& array, const std::string& file) {
    const auto wanted = numpy_name(input.type);
    // Types without a numpy type are stored as void types or unsigned integers of the same size.
    const bool same = wanted[1] == 'V' ? std::string("Vu").find(array.type[1]) != std::string::npos &&
                                             array.type.substr(2) == wanted.substr(2)
                                       : array.type == wanted;
    if (!same) {
        throw Error(file + ": input '" + input.name + "' must be of type '" + wanted + "', not '" + array.type + "'");
    }
    if (input.fixed && array.shape != input.shape) {
        throw Error(file + ": input '" + input.name + "' must have the shape " + to_string(input.shape) + ", not " +
                    to_string(array.shape));
    }
}

}  // namespace

FrameInputs::FrameInputs(const Program& program, const std::string& path) : program_(program) {
    if (path.empty()) return;
    std::error_code code;
    if (!fs::is_directory(path, code)) {
        files_.push_back(path);
    } else {
        for (const auto& entry : fs::directory_iterator(path)) {
            if (is_input_file(entry.path().string())) files_.push_back(entry.path().string());
        }
        std::sort(files_.begin(), files_.end());
    }
    if (files_.empty()) throw Error(path + ": no input files: expected .npz, .npy or image files");
    if (!fs::exists(files_[0], code)) throw Error(files_[0] + ": no such file");
    for (const auto& file : files_) {
        if (!is_input_file(file)) throw Error(file + ": not an input file: expected an .npz, .npy or image file");
        if (!ends_with(file, ".npz") && program.inputs.size() != 1) {
            throw Error(file + ": the network has " + std::to_string(program.inputs.size()) +
                        " inputs: store them by name in an .npz file");
        }
    }
}

void FrameInputs::set_inputs(std::size_t frame, const std::vector<Rank::Input>& inputs, std::vector<Tensor>& tensors) {
    const auto& file = files_[frame % files_.size()];
    if (file != last_file_) read(file);
    for (const auto& input : inputs) {
        const auto& array = arrays_.at(program_.inputs[input.index].name);
        auto& tensor = tensors[input.tensor];
        tensor.type = program_.inputs[input.index].type;
        tensor.shape = array.shape;
        tensor.data = array.data.get();
        tensor.owner = array.data;
    }
}

bool FrameInputs::set_initial_state(std::size_t frame, const Rank::State& state, Tensor& tensor) {
    if (files_.empty()) return false;
    const auto& file = files_[frame % files_.size()];
    if (file != last_file_) read(file);
    const auto is_given = [&](const Input& input) { return arrays_.count(input.name) != 0; };
    if (std::none_of(program_.states.begin(), program_.states.end(), is_given)) return false;
    const auto found = arrays_.find(program_.states[state.index].name);
    if (found == arrays_.end()) {
        std::memset(tensor.data, 0, tensor.bytes());
    } else {
        copy_piece(found->second, state.start, tensor);
    }
    return true;
}

void FrameInputs::read(const std::string& file) {
    arrays_.clear();
    last_file_.clear();
    if (ends_with(file, ".npz")) {
        arrays_ = read_npz(file);
    } else if (ends_with(file, ".npy")) {
        arrays_[program_.inputs[0].name] = read_npy(file);
    } else {
        const auto& input = program_.inputs[0];
        const bool takes_image = input.fixed && input.type == Type::float32 && input.shape.size() == 4 &&
                                 input.shape[0] == 1 &&
                                 input.shape[1] == (program_.preprocessing.order == "GRAY" ? 1 : 3);
        if (!takes_image) {
            throw Error(file + ": input '" + input.name + "' " + to_string(input.shape) + " cannot be read from a " +
                        program_.preprocessing.order + " image: use .npy, or compile with another channel order");
        }
        arrays_[input.name] = read_image(file, input.shape, program_.preprocessing);
    }
    for (const auto& input : program_.inputs) {
        if (arrays_.count(input.name) == 0) throw Error(file + ": input '" + input.name + "' is missing");
        check_array(input, arrays_.at(input.name), file);
    }
    for (const auto& entry : arrays_) {
        const auto has_name = [&](const Input& input) { return input.name == entry.first; };
        const auto state = std::find_if(program_.states.begin(), program_.states.end(), has_name);
        if (state != program_.states.end()) {
            check_array(*state, entry.second, file);
        } else if (std::none_of(program_.inputs.begin(), program_.inputs.end(), has_name)) {
            throw Error(file + ": the network has no input '" + entry.first + "'");
        }
    }
    last_file_ = file;
}

}  // namespace dicompiler
