// The program of a device: sets up, then takes one frame after another. The same for all devices; what differs stands
// in program.cc, resolver.cc, arena.h and the models.
#include <cstring>
#include <new>

#include "application.h"
#include "arena.h"
#include "program.h"
#include "resolver.h"
#include "tensorflow/lite/micro/micro_interpreter.h"
#include "tensorflow/lite/micro/system_setup.h"
#include "tensorflow/lite/schema/schema_generated.h"
#include "transport.h"

namespace dicompiler {
namespace {

alignas(16) unsigned char arena[kArenaBytes];
alignas(16) unsigned char buffers[kBufferBytes];
alignas(tflite::MicroInterpreter) unsigned char place[sizeof(tflite::MicroInterpreter)];
tflite::MicroInterpreter* interpreter = nullptr;
int loaded = -1;

unsigned char* Data(int tensor) { return buffers + kTensors[tensor].offset; }

// One arena serves all models, one after another; a model that is there already is not set up again.
bool Load(int model) {
  if (model == loaded) return true;
  if (interpreter != nullptr) interpreter->~MicroInterpreter();
  interpreter = nullptr;
  loaded = -1;
  const tflite::MicroOpResolver* resolver = GetResolver();
  if (resolver == nullptr) return false;
  const tflite::Model* root = tflite::GetModel(kModels[model].data);
  if (root->version() != 3) return false;
  interpreter = new (place) tflite::MicroInterpreter(root, *resolver, arena, kModels[model].arena_bytes);
  if (interpreter->AllocateTensors() != kTfLiteOk) return false;
  loaded = model;
  return true;
}

// Waits for the inputs of a segment that come from peers.
bool Receive(const Segment& segment) {
  for (int i = 0; i < kIncomingCount; ++i) {
    for (int k = 0; k < segment.input_count; ++k) {
      if (kIncoming[i].tensor == segment.inputs[k] && !GetTransport().Wait(i)) return false;
    }
  }
  return true;
}

bool Run(const Segment& segment) {
  if (!Load(segment.model)) return false;
  for (int i = 0; i < segment.input_count; ++i) {
    const int tensor = segment.inputs[i];
    TfLiteTensor* input = interpreter->input(static_cast<std::size_t>(i));
    if (input->bytes != kTensors[tensor].bytes) return false;
    std::memcpy(input->data.raw, Data(tensor), input->bytes);
  }
  if (interpreter->Invoke() != kTfLiteOk) return false;
  for (int i = 0; i < segment.output_count; ++i) {
    const int tensor = segment.outputs[i];
    const TfLiteTensor* output = interpreter->output(static_cast<std::size_t>(i));
    if (output->bytes != kTensors[tensor].bytes) return false;
    std::memcpy(Data(tensor), output->data.raw, output->bytes);
  }
  return true;
}

bool Setup(int argc, char** argv) {
  tflite::InitializeTarget();
  return GetTransport().Start(argc, argv);
}

enum class Outcome { kGoOn, kEnd, kFailed };

// One frame. kEnd where there is no further one: the inputs, or the peers, have come to their end.
Outcome Loop() {
  for (int i = 0; i < kIncomingCount; ++i) GetTransport().Post(i, Data(kIncoming[i].tensor));
  for (int i = 0; i < kInputCount; ++i) {
    const int tensor = kInputs[i].tensor;
    if (!ReadInput(kInputs[i].index, Data(tensor), kTensors[tensor].bytes)) return Outcome::kEnd;
  }
  for (int i = 0; i < kStepCount; ++i) {
    const Step& step = kSteps[i];
    if (step.kind == StepKind::kRun) {
      const Segment& segment = kSegments[step.index];
      // A device that is given no input ends with those that it receives from.
      if (!Receive(segment)) return kInputCount == 0 ? Outcome::kEnd : Outcome::kFailed;
      if (!Run(segment)) return Outcome::kFailed;
    } else if (!GetTransport().Send(step.index, Data(kOutgoing[step.index].tensor))) {
      return Outcome::kFailed;
    }
  }
  for (int i = 0; i < kOutputCount; ++i) {
    const int tensor = kOutputs[i].tensor;
    if (!WriteOutput(kOutputs[i].index, Data(tensor), kTensors[tensor].bytes)) return Outcome::kFailed;
  }
  return Outcome::kGoOn;
}

}  // namespace
}  // namespace dicompiler

int main(int argc, char** argv) {
  if (!dicompiler::Setup(argc, argv)) return 1;
  dicompiler::Outcome outcome = dicompiler::Outcome::kGoOn;
  while (outcome == dicompiler::Outcome::kGoOn) outcome = dicompiler::Loop();
  return outcome == dicompiler::Outcome::kEnd ? 0 : 1;
}
