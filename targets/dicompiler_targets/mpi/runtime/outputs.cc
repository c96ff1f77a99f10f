#include "outputs.hpp"

#include <cstdio>
#include <filesystem>

#include "npy.hpp"

namespace dicompiler {

namespace fs = std::filesystem;

OutputWriter::OutputWriter(const std::string& directory, const std::string& device, std::size_t kept_frames,
                           bool partial)
    : kept_frames_(kept_frames), partial_(partial) {
    if (directory.empty()) return;
    directory_ = directory + "/" + device;
    hidden_directory_ = directory + "/." + device + ".part";
    std::error_code code;
    fs::remove_all(hidden_directory_, code);  // a run that was killed may have left the directory
    fs::create_directories(hidden_directory_, code);
    if (code) throw Error(hidden_directory_ + ": cannot be written: " + code.message());
}

OutputWriter::~OutputWriter() { discard(); }

void OutputWriter::write(std::size_t frame, const Tensor& tensor, const std::string& file) {
    if (hidden_directory_.empty() || frame >= kept_frames_) return;
    if (tensor.type == Type::other) throw Error("output '" + tensor.name + "' cannot be stored in an .npy file");
    char prefix[32];
    std::snprintf(prefix, sizeof prefix, "/frame%06zu_", frame);
    write_npy(hidden_directory_ + prefix + file, tensor);
}

void OutputWriter::publish() {
    if (hidden_directory_.empty()) return;
    std::error_code code;
    fs::remove_all(directory_, code);
    fs::rename(hidden_directory_, directory_, code);
    if (code) throw Error(directory_ + ": cannot be written: " + code.message());
    hidden_directory_.clear();
}

void OutputWriter::discard() {
    std::error_code code;
    if (!hidden_directory_.empty() && !partial_) fs::remove_all(hidden_directory_, code);
    hidden_directory_.clear();
}

}  // namespace dicompiler
