// What this device does for a frame, as tables: program.cc, which is generated, fills them in.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dicompiler {

// A tensor outside the arena: its place in the buffers. Images lie channels last (N, H, W, C).
struct Tensor {
  std::size_t offset;
  std::size_t bytes;
};

// A TFLite model in flash, and the bytes of the arena that it needs, margin included.
struct Model {
  const unsigned char* data;
  std::size_t arena_bytes;
};

// A model that is run, with the tensors that it reads and makes. Tiles of equal shape share a model.
struct Segment {
  int model;
  const int* inputs;
  int input_count;
  const int* outputs;
  int output_count;
};

// A tensor that goes to a peer or comes from one. `index` is its number in the whole cluster.
struct Transfer {
  std::uint16_t index;
  int peer;
  int tensor;
};

// An input or output of the network, by its number there.
struct Border {
  int index;
  int tensor;
};

enum class StepKind { kRun, kSend };

// kRun: a segment, once its inputs are there; kSend: one of the outgoing transfers.
struct Step {
  StepKind kind;
  int index;
};

extern const int kDevice;              // number of this device
extern const int kPeerDevices[];       // numbers of the devices that it talks to
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
extern const Border kInputs[];
extern const int kInputCount;
extern const Border kOutputs[];
extern const int kOutputCount;

}  // namespace dicompiler
