// Interface of the engine that computes segments. engine_onnxruntime.cc implements it.
#pragma once

#include "tensor.hpp"

namespace dicompiler {

// A segment bound to the tensors of one frame. run() reads and writes the tensors in place: fixed tensors are never
// copied. Inputs that are not fixed are bound again for each run; outputs that are not fixed are set by it.
class BoundSegment {
public:
    virtual ~BoundSegment() = default;
    virtual void run() = 0;
};

// A loaded segment. The tensors must outlive the bound segment; their names are those of the segment's graph.
class Segment {
public:
    virtual ~Segment() = default;
    virtual std::unique_ptr<BoundSegment> bind(const std::vector<Tensor*>& inputs,
                                               const std::vector<Tensor*>& outputs) = 0;
};

struct EngineOptions {
    int threads = 1;
    // Level of graph optimization: "none", "basic", "extended" or "all".
    std::string optimization;
    // Execution provider that is used in addition to the CPU: "" or a name such as "CUDA".
    std::string provider;
    // True if worker threads stop spinning when a segment ends, because the cores are needed to send and receive.
    bool yields = true;
};

class Engine {
public:
    virtual ~Engine() = default;
    virtual std::unique_ptr<Segment> load(const std::string& path) = 0;
};

// Throws Error if the engine cannot start or lacks the provider.
std::unique_ptr<Engine> make_engine(const EngineOptions& options);

}  // namespace dicompiler
