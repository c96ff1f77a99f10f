#include "outputs.hpp"

#include <cstdio>
#include <filesystem>

#include "npy.hpp"

namespace dicompiler {
namespace {

namespace fs = std::filesystem;

}  // namespace

Outputs::Outputs(const std::string& directory, const std::string& device, std::size_t keep, bool partial)
    : keep_(keep), partial_(partial) {
    if (directory.empty()) return;
    place_ = directory + "/" + device;
    stage_ = directory + "/." + device + ".part";
    std::error_code code;
    fs::remove_all(stage_, code);  // of a run that was killed
    fs::create_directories(stage_, code);
    if (code) throw Error(stage_ + ": cannot be written: " + code.message());
}

Outputs::~Outputs() { discard(); }

void Outputs::write(std::size_t frame, const Tensor& tensor, const std::string& file) {
    if (stage_.empty() || frame >= keep_) return;
    if (tensor.type == Type::other) throw Error("output '" + tensor.name + "' is no tensor that .npy files can hold");
    char head[32];
    std::snprintf(head, sizeof head, "/frame%06zu_", frame);
    write_npy(stage_ + head + file, tensor);
}

void Outputs::publish() {
    if (stage_.empty()) return;
    std::error_code code;
    fs::remove_all(place_, code);
    fs::rename(stage_, place_, code);
    if (code) throw Error(place_ + ": cannot be written: " + code.message());
    stage_.clear();
}

void Outputs::discard() {
    std::error_code code;
    if (!stage_.empty() && !partial_) fs::remove_all(stage_, code);
    stage_.clear();
}

}  // namespace dicompiler
