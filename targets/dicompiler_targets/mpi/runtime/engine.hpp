// Interface of the engines that compute segments, the submodels of a rank (MPI process). engine_onnxruntime.cc and
// engine_ncnn.cc implement it. A program contains engine_ncnn.cc only if ncnn computes one of its segments.
#pragma once

#include "tensor.hpp"

namespace dicompiler {

// A segment bound to the tensors of one frame in flight. run() reads the inputs and writes the outputs in place if
// their shapes are known (Tensor::fixed). For other outputs, run() sets type, shape and data of the tensor.
class BoundSegment {
public:
    virtual ~BoundSegment() = default;
    virtual void run() = 0;
};

// A loaded segment (an ONNX submodel, or its conversion for ncnn). The tensors that are passed to bind() must have the
// names of the segment's inputs and outputs, and outlive the bound segment.
class Segment {
public:
    virtual ~Segment() = default;
    virtual std::unique_ptr<BoundSegment> bind(const std::vector<Tensor*>& inputs,
                                               const std::vector<Tensor*>& outputs) = 0;
};

struct EngineOptions {
    int threads = 1;
    // The level of graph optimization: "none", "basic", "extended" or "all".
    std::string optimization;
    // The name of an execution provider that is used in addition to the CPU, such as "CUDA"; "" for none.
    std::string provider;
    // True if the engine's threads must sleep between segments, because sending and receiving need the cores.
    bool yields = true;
    // The version of ncnn for which the segments were converted; "" if ncnn computes none of them.
    std::string ncnn_version = "";
};

class Engine {
public:
    virtual ~Engine() = default;
    virtual std::unique_ptr<Segment> load(const std::string& path) = 0;
};

// Start an engine. Throw Error if it cannot start, or does not have the execution provider.
std::unique_ptr<Engine> make_onnxruntime(const EngineOptions& options);
std::unique_ptr<Engine> make_ncnn(const EngineOptions& options);

// Returns an engine that loads each segment with the engine of its file: ncnn for .net, onnxruntime for .onnx.
std::unique_ptr<Engine> make_engine(const EngineOptions& options);

}  // namespace dicompiler
