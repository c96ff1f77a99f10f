#include "engine.hpp"

namespace dicompiler {
namespace {

class EngineOfFile : public Engine {
public:
    explicit EngineOfFile(EngineOptions options) : options_(std::move(options)) {}

    std::unique_ptr<Segment> load(const std::string& path) override {
#ifdef DICOMPILER_NCNN
        const std::string suffix = ".net";
        if (path.size() > suffix.size() && path.compare(path.size() - suffix.size(), suffix.size(), suffix) == 0) {
            if (ncnn_ == nullptr) ncnn_ = make_ncnn(options_);
            return ncnn_->load(path);
        }
#endif
        if (onnxruntime_ == nullptr) onnxruntime_ = make_onnxruntime(options_);
        return onnxruntime_->load(path);
    }

private:
    EngineOptions options_;
    std::unique_ptr<Engine> onnxruntime_, ncnn_;
};

}  // namespace

std::unique_ptr<Engine> make_engine(const EngineOptions& options) { return std::make_unique<EngineOfFile>(options); }

}  // namespace dicompiler
