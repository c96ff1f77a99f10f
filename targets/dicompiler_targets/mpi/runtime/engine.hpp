// What computes segments. One implementation is compiled in; engine_onnxruntime.cc is the one that there is.
#pragma once

#include "tensor.hpp"

namespace dicompiler {

// A segment tied to the tensors of one frame. run() computes the outputs from the inputs where they lie: fixed tensors
// are never copied; of the others the inputs are looked at anew each time, and the outputs are filled in.
class Call {
public:
    virtual ~Call() = default;
    virtual void run() = 0;
};

// A segment that was loaded. The tensors must outlive the call; their names are those of the segment's graph.
class Segment {
public:
    virtual ~Segment() = default;
    virtual std::unique_ptr<Call> bind(const std::vector<Tensor*>& inputs, const std::vector<Tensor*>& outputs) = 0;
};

struct EngineOptions {
    int threads = 1;
    // Level of graph optimisation: "none", "basic", "extended" or "all".
    std::string optimization;
    // Where segments run beside the processor: "" or the name of a provider such as "CUDA".
    std::string provider;
    // Whether threads stop to look for work as soon as a segment ends: the processor belongs to who sends and receives.
    bool yields = true;
};

class Engine {
public:
    virtual ~Engine() = default;
    virtual std::unique_ptr<Segment> load(const std::string& path) = 0;
};

// Throws Error where the engine is not there, or lacks the provider.
std::unique_ptr<Engine> make_engine(const EngineOptions& options);

}  // namespace dicompiler
