// What this device does for a frame, as tables: program.cc, which is generated, fills them in.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dicompiler {

// A tensor outside of the arenas: its place in the memory. Images lie channels last (N, H, W, C).
struct Tensor {
  std::size_t offset;
  std::size_t bytes;
};

// A TFLite model in flash, and the bytes of the arena that it needs, margin included.
struct Model {
  const unsigned char* data;
  std::size_t arena_bytes;
};

// Bytes that are copied: `run` in one piece, again and again in three loops, the outermost first. source, target: a
// tensor, or the model's input or output of that number. start, to: the first byte in either.
struct Copy {
  int source;
  int target;
  std::size_t start;
  std::size_t to;
  std::size_t run;
  std::size_t times[3];
  std::size_t source_steps[3];
  std::size_t target_steps[3];
};

// A model that is run, -1 for none, the place of its arena (free for others behind it, or not), and the tensors that it
// waits for. Copied are, before it, parts of tensors into its inputs; behind it its outputs, or parts of them, into
// tensors; and tensors into tensors. So tiles of equal shape share a model.
struct Segment {
  int model;
  std::size_t arena;
  bool frees_arena;
  const int* inputs;
  int input_count;
  const Copy* gathers;
  int gather_count;
  const Copy* places;
  int place_count;
  const Copy* copies;
  int copy_count;
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
