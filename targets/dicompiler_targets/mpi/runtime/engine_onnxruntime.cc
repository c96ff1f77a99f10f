// ONNX Runtime behind the interface of engine.hpp. All segments of a rank share one pool of threads.
#define ORT_API_MANUAL_INIT
#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "engine.hpp"

namespace dicompiler {
namespace {

// onnxruntime's messages go over several lines.
std::string one_line(std::string text) {
    std::replace(text.begin(), text.end(), '\n', ' ');
    return text;
}


class OrtCall : public Call {
public:
    OrtCall(Ort::Session& session, std::string place, std::vector<Tensor*> inputs, std::vector<Tensor*> outputs)
        : session_(session),
          place_(std::move(place)),
          inputs_(std::move(inputs)),
          outputs_(std::move(outputs)),
          memory_(Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault)),
          binding_(session),
          given_(inputs_.size()) {
        for (const auto* tensor : inputs_) {
            if (tensor->fixed) binding_.BindInput(tensor->name.c_str(), value(*tensor));
        }
        for (const auto* tensor : outputs_) {
            loose_ = loose_ || !tensor->fixed;
            if (tensor->fixed) binding_.BindOutput(tensor->name.c_str(), value(*tensor));
        }
    }

    void run() override {
        try {
            rebind();
            session_.Run(Ort::RunOptions{nullptr}, binding_);
            if (loose_) take();
        } catch (const Ort::Exception& error) {
            throw Error(place_ + ": onnxruntime cannot run it: " + one_line(error.what()));
        }
    }

private:
    Ort::Value value(const Tensor& tensor) const {
        return Ort::Value::CreateTensor(memory_, tensor.data, tensor.bytes(), tensor.shape.data(), tensor.shape.size(),
                                        static_cast<ONNXTensorElementDataType>(tensor.type));
    }

    void rebind() {
        for (std::size_t i = 0; i < inputs_.size(); ++i) {
            const auto& tensor = *inputs_[i];
            if (tensor.fixed) continue;
            if (tensor.opaque) {
                binding_.BindInput(tensor.name.c_str(), *static_cast<Ort::Value*>(tensor.owner.get()));
            } else if (given_[i] != tensor.owner || tensor.owner == nullptr) {
                binding_.BindInput(tensor.name.c_str(), value(tensor));
                given_[i] = tensor.owner;
            }
        }
        for (const auto* tensor : outputs_) {
            if (!tensor->fixed) binding_.BindOutput(tensor->name.c_str(), memory_);
        }
    }

    // Takes what the engine has allocated itself.
    void take() {
        auto made = binding_.GetOutputValues();
        const auto names = binding_.GetOutputNames();
        for (auto* tensor : outputs_) {
            if (tensor->fixed) continue;
            const auto at = std::find(names.begin(), names.end(), tensor->name) - names.begin();
            auto owner = std::make_shared<Ort::Value>(std::move(made[static_cast<std::size_t>(at)]));
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
    std::string place_;
    std::vector<Tensor*> inputs_, outputs_;
    Ort::MemoryInfo memory_;
    Ort::IoBinding binding_;
    std::vector<std::shared_ptr<void>> given_;
    bool loose_ = false;
};

class OrtSegment : public Segment {
public:
    OrtSegment(const Ort::Env& env, const std::string& path, const Ort::SessionOptions& options)
        : path_(path), session_(env, path.c_str(), options) {}

    std::unique_ptr<Call> bind(const std::vector<Tensor*>& inputs, const std::vector<Tensor*>& outputs) override {
        try {
            return std::make_unique<OrtCall>(session_, path_, inputs, outputs);
        } catch (const Ort::Exception& error) {
            throw Error(path_ + ": its tensors do not fit: " + one_line(error.what()));
        }
    }

private:
    std::string path_;
    Ort::Session session_;
};

class OrtEngine : public Engine {
public:
    explicit OrtEngine(const EngineOptions& options) : env_(nullptr) {
        // onnxruntime 1.32 keeps a number of the device and sends what it is used for, unless told before.
        setenv("ORT_DISABLE_TELEMETRY", "1", 0);
        Ort::ThreadingOptions threads;
        threads.SetGlobalIntraOpNumThreads(options.threads).SetGlobalInterOpNumThreads(1);
        env_ = Ort::Env(threads, ORT_LOGGING_LEVEL_ERROR, "dicompiler");
        // One arena for all segments; else each would keep the most that it ever needed.
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
        // What is fused differs from segment to segment, and rounds otherwise.
        if (options.optimization != "all") options_.AddConfigEntry("session.disable_quant_qdq", "1");
        options_.DisablePerSessionThreads();
        if (!options.provider.empty()) add(options.provider);
    }

    std::unique_ptr<Segment> load(const std::string& path) override {
        try {
            try {
                return std::make_unique<OrtSegment>(env_, path, options_);
            } catch (const Ort::Exception& error) {
                // On some processors onnxruntime makes uint8 of int8, and then refuses its own QuantizeLinear of opset
                // 21, whose type stands in an attribute (its issue 25526): it is loaded as on those that keep int8.
                if (!std::strstr(error.what(), "QuantizeLinear")) throw;
                auto own = options_.Clone();
                own.AddConfigEntry("session.qdqisint8allowed", "1");
                return std::make_unique<OrtSegment>(env_, path, own);
            }
        } catch (const Ort::Exception& error) {
            throw Error(path + " cannot be loaded: " + one_line(error.what()));
        }
    }

private:
    void add(const std::string& provider) {
        const auto known = Ort::GetAvailableProviders();
        const auto name = provider + "ExecutionProvider";
        if (std::find(known.begin(), known.end(), name) == known.end()) {
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
            throw Error(name + " cannot be used: " + one_line(error.what()));
        }
    }

    Ort::Env env_;
    Ort::SessionOptions options_;
};

}  // namespace

std::unique_ptr<Engine> make_engine(const EngineOptions& options) {
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
        throw Error("onnxruntime cannot start: " + one_line(error.what()));
    }
}

}  // namespace dicompiler
