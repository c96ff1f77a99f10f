// Implements the engine interface with onnxruntime. All segments of a rank share one thread pool.
#define ORT_API_MANUAL_INIT
#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "engine.hpp"

namespace dicompiler {
namespace {

// Messages of onnxruntime may have several lines, error messages have one.
std::string to_one_line(std::string text) {
    std::replace(text.begin(), text.end(), '\n', ' ');
    return text;
}

class OrtBoundSegment : public BoundSegment {
public:
    OrtBoundSegment(Ort::Session& session, std::string path, std::vector<Tensor*> inputs, std::vector<Tensor*> outputs)
        : session_(session),
          path_(std::move(path)),
          inputs_(std::move(inputs)),
          outputs_(std::move(outputs)),
          memory_(Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault)),
          binding_(session),
          bound_owners_(inputs_.size()) {
        for (const auto* tensor : inputs_) {
            if (tensor->fixed) binding_.BindInput(tensor->name.c_str(), make_value(*tensor));
        }
        for (const auto* tensor : outputs_) {
            has_dynamic_outputs_ = has_dynamic_outputs_ || !tensor->fixed;
            if (tensor->fixed) binding_.BindOutput(tensor->name.c_str(), make_value(*tensor));
        }
    }

    void run() override {
        try {
            bind_dynamic_tensors();
            session_.Run(Ort::RunOptions{nullptr}, binding_);
            if (has_dynamic_outputs_) take_dynamic_outputs();
        } catch (const Ort::Exception& error) {
            throw Error(path_ + ": onnxruntime cannot run it: " + to_one_line(error.what()));
        }
    }

private:
    Ort::Value make_value(const Tensor& tensor) const {
        return Ort::Value::CreateTensor(memory_, tensor.data, tensor.bytes(), tensor.shape.data(), tensor.shape.size(),
                                        static_cast<ONNXTensorElementDataType>(tensor.type));
    }

    void bind_dynamic_tensors() {
        for (std::size_t i = 0; i < inputs_.size(); ++i) {
            const auto& tensor = *inputs_[i];
            if (tensor.fixed) continue;
            if (tensor.opaque) {
                binding_.BindInput(tensor.name.c_str(), *static_cast<Ort::Value*>(tensor.owner.get()));
            } else if (bound_owners_[i] != tensor.owner || tensor.owner == nullptr) {
                binding_.BindInput(tensor.name.c_str(), make_value(tensor));
                bound_owners_[i] = tensor.owner;
            }
        }
        for (const auto* tensor : outputs_) {
            if (!tensor->fixed) binding_.BindOutput(tensor->name.c_str(), memory_);
        }
    }

    // Takes ownership of the outputs that onnxruntime has allocated.
    void take_dynamic_outputs() {
        auto values = binding_.GetOutputValues();
        const auto names = binding_.GetOutputNames();
        for (auto* tensor : outputs_) {
            if (tensor->fixed) continue;
            const auto index = std::find(names.begin(), names.end(), tensor->name) - names.begin();
            auto owner = std::make_shared<Ort::Value>(std::move(values[static_cast<std::size_t>(index)]));
            tensor->opaque = true;
            if (owner->IsTensor()) {
                const auto info = owner->GetTensorTypeAndShapeInfo();
                tensor->type = static_cast<Type>(info.GetElementType());
                tensor->shape = info.GetShape();
                tensor->data = owner->GetTensorMutableRawData();
            }
            tensor->owner = std::move(owner);
        }
    }

    Ort::Session& session_;
    std::string path_;
    std::vector<Tensor*> inputs_, outputs_;
    Ort::MemoryInfo memory_;
    Ort::IoBinding binding_;
    std::vector<std::shared_ptr<void>> bound_owners_;
    bool has_dynamic_outputs_ = false;
};

class OrtSegment : public Segment {
public:
    OrtSegment(const Ort::Env& env, const std::string& path, const Ort::SessionOptions& options)
        : path_(path), session_(env, path.c_str(), options) {}

    std::unique_ptr<BoundSegment> bind(const std::vector<Tensor*>& inputs,
                                       const std::vector<Tensor*>& outputs) override {
        try {
            return std::make_unique<OrtBoundSegment>(session_, path_, inputs, outputs);
        } catch (const Ort::Exception& error) {
            throw Error(path_ + ": its tensors do not match the program: " + to_one_line(error.what()));
        }
    }

private:
    std::string path_;
    Ort::Session session_;
};

class OrtEngine : public Engine {
public:
    explicit OrtEngine(const EngineOptions& options) : env_(nullptr) {
        // onnxruntime 1.32 stores a device identifier and sends usage data unless this variable is set.
        setenv("ORT_DISABLE_TELEMETRY", "1", 0);
        Ort::ThreadingOptions threads;
        threads.SetGlobalIntraOpNumThreads(options.threads).SetGlobalInterOpNumThreads(1);
        env_ = Ort::Env(threads, ORT_LOGGING_LEVEL_ERROR, "dicompiler");
        // With one memory arena for each segment instead of a shared one, each would keep its peak memory.
        const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
        env_.CreateAndRegisterAllocator(memory, Ort::ArenaCfg(0, -1, -1, -1));
        options_.AddConfigEntry("session.use_env_allocators", "1");
        if (options.yields) options_.AddConfigEntry("session.force_spinning_stop", "1");
        const std::vector<std::pair<std::string, GraphOptimizationLevel>> levels{
            {"none", ORT_DISABLE_ALL},
            {"basic", ORT_ENABLE_BASIC},
            {"extended", ORT_ENABLE_EXTENDED},
            {"all", ORT_ENABLE_ALL},
        };
        for (const auto& level : levels) {
            if (level.first == options.optimization) options_.SetGraphOptimizationLevel(level.second);
        }
        // onnxruntime's fusions of quantized operators depend on the segment, and fused operators round differently.
        // With these fusions, results would depend on the split of the network.
        if (options.optimization != "all") options_.AddConfigEntry("session.disable_quant_qdq", "1");
        options_.DisablePerSessionThreads();
        if (!options.provider.empty()) add_provider(options.provider);
    }

    std::unique_ptr<Segment> load(const std::string& path) override {
        try {
            try {
                return std::make_unique<OrtSegment>(env_, path, options_);
            } catch (const Ort::Exception& error) {
                // On some processors, onnxruntime converts int8 to uint8. It then rejects QuantizeLinear nodes of opset
                // 21, which have their type in an attribute (onnxruntime issue 25526). This option keeps int8.
                if (!std::strstr(error.what(), "QuantizeLinear")) throw;
                auto int8_options = options_.Clone();
                int8_options.AddConfigEntry("session.qdqisint8allowed", "1");
                return std::make_unique<OrtSegment>(env_, path, int8_options);
            }
        } catch (const Ort::Exception& error) {
            throw Error(path + " cannot be loaded: " + to_one_line(error.what()));
        }
    }

private:
    void add_provider(const std::string& provider) {
        const auto available = Ort::GetAvailableProviders();
        const auto name = provider + "ExecutionProvider";
        if (std::find(available.begin(), available.end(), name) == available.end()) {
            throw Error("the device is a GPU, but this onnxruntime has no " + name +
                        ": build with a library that has it, or compile for another provider");
        }
        try {
            if (provider == "CUDA") {
                options_.AppendExecutionProvider_CUDA(OrtCUDAProviderOptions{});
            } else if (provider == "TensorRT" || provider == "Tensorrt") {
                options_.AppendExecutionProvider_TensorRT(OrtTensorRTProviderOptions{});
            } else {
                options_.AppendExecutionProvider(provider);
            }
        } catch (const Ort::Exception& error) {
            throw Error(name + " cannot be used: " + to_one_line(error.what()));
        }
    }

    Ort::Env env_;
    Ort::SessionOptions options_;
};

}  // namespace

std::unique_ptr<Engine> make_onnxruntime(const EngineOptions& options) {
    const auto* base = OrtGetApiBase();
    const auto* api = base->GetApi(ORT_API_VERSION);
    if (api == nullptr) {
        throw Error("the onnxruntime library is version " + std::string(base->GetVersionString()) +
                    ", older than the headers that this program was built with (1." + std::to_string(ORT_API_VERSION) +
                    "): install a newer library, or build again with its own headers");
    }
    Ort::InitApi(api);
    try {
        return std::make_unique<OrtEngine>(options);
    } catch (const Ort::Exception& error) {
        throw Error("onnxruntime cannot start: " + to_one_line(error.what()));
    }
}

}  // namespace dicompiler
