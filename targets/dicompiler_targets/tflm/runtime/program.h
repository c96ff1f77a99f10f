// The work of this device for one frame (inference request), as tables. The generated program.cc defines them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dicompiler {

// A tensor outside of the arenas (working memory of models), at an offset in the device's memory. Images have channels
// last (N, H, W, C).
struct Tensor {
  std::size_t offset;
  std::size_t bytes;
};

// A TFLite model in flash, and the size of the arena (working memory) that it needs, including a margin.
struct Model {
  const unsigned char* data;
  std::size_t arena_bytes;
};

// A strided copy: blocks of `run_bytes` contiguous bytes, repeated by three nested loops, the outermost first. `source`
// and `target` are indices of tensors, or of the model's inputs or outputs. The offsets are those of the first byte.
struct Copy {
  int source;
  int target;
  std::size_t source_offset;
  std::size_t target_offset;
  std::size_t run_bytes;
  std::size_t counts[3];
  std::size_t source_strides[3];
  std::size_t target_strides[3];
};

// A segment: the run of a model, with the copies before it (from tensors into the model's inputs) and after it (from
// the model's outputs to tensors, and from tensors to tensors). Segments of equal shape, such as tiles, share a model.
// `inputs` are the tensors that the segment waits for.
struct Segment {
  int model;                 // -1: no model is run
  std::size_t arena_offset;
  bool frees_arena;          // true if tensors or other arenas may use the arena's memory after the run
  const int* inputs;
  int input_count;
  const Copy* input_copies;
  int input_copy_count;
  const Copy* output_copies;
  int output_copy_count;
  const Copy* tensor_copies;
  int tensor_copy_count;
};

// A tensor that is sent to or received from a peer. `index` is the transfer's number in the whole cluster.
struct Transfer {
  std::uint16_t index;
  int peer;
  int tensor;
};

// An input or output of the network. `index` is its number among the network's inputs or outputs.
struct NetworkTensor {
  int index;
  int tensor;
};

enum class StepKind { kRun, kSend };

// A step: the run of a segment (kRun), which first waits for its inputs, or an outgoing transfer (kSend).
struct Step {
  StepKind kind;
  int index;
};

extern const int kDevice;         // the number of this device
extern const int kPeerDevices[];  // the numbers of the devices that this device exchanges tensors with (its peers)
extern const char* const kPeerNames[];
extern const int kPeerCount;
extern const Tensor kTensors[];
extern const Model kModels[];
extern const Segment kSegments[];
extern const Transfer kIncoming[];
extern const int kIncomingCount;
extern const Transfer kOutgoing[];
extern const Step kSteps[];
extern const int kStepCount;
extern const NetworkTensor kInputs[];
extern const int kInputCount;
extern const NetworkTensor kOutputs[];
extern const int kOutputCount;

}  // namespace dicompiler
