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

alignas(16) unsigned char memory[kMemoryBytes];
alignas(tflite::MicroInterpreter) unsigned char place[sizeof(tflite::MicroInterpreter)];
tflite::MicroInterpreter* interpreter = nullptr;
int loaded = -1;

unsigned char* Data(int tensor) { return memory + kTensors[tensor].offset; }

// What is in the arena is needed for this as well: others may only use it afterwards.
void Unload() {
  if (interpreter != nullptr) interpreter->~MicroInterpreter();
  interpreter = nullptr;
  loaded = -1;
}

// The arenas of models lie in one memory with the tensors beside them, where there is room while they run. A model that
// is there already is not set up again.
bool Load(int model, std::size_t place_of_arena) {
  if (model == loaded) return true;
  Unload();
  const tflite::MicroOpResolver* resolver = GetResolver();
  if (resolver == nullptr) return false;
  const tflite::Model* root = tflite::GetModel(kModels[model].data);
  if (root->version() != 3) return false;
  interpreter = new (place) tflite::MicroInterpreter(root, *resolver, memory + place_of_arena, kModels[model].arena_bytes);
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

// Whether the last byte of a copy lies within both ends.
bool Fits(const Copy& copy, std::size_t source_bytes, std::size_t target_bytes) {
  std::size_t source = copy.start + copy.run, target = copy.to + copy.run;
  for (int i = 0; i < 3; ++i) {
    source += (copy.times[i] - 1) * copy.source_steps[i];
    target += (copy.times[i] - 1) * copy.target_steps[i];
  }
  return source <= source_bytes && target <= target_bytes;
}

void Move(const Copy& copy, const unsigned char* source, unsigned char* target) {
  source += copy.start;
  target += copy.to;
  for (std::size_t i = 0; i < copy.times[0]; ++i) {
    for (std::size_t j = 0; j < copy.times[1]; ++j) {
      for (std::size_t k = 0; k < copy.times[2]; ++k) {
        std::memcpy(target + i * copy.target_steps[0] + j * copy.target_steps[1] + k * copy.target_steps[2],
                    source + i * copy.source_steps[0] + j * copy.source_steps[1] + k * copy.source_steps[2], copy.run);
      }
    }
  }
}

bool Gather(const Copy& copy) {
  TfLiteTensor* input = interpreter->input(static_cast<std::size_t>(copy.target));
  if (!Fits(copy, kTensors[copy.source].bytes, input->bytes)) return false;
  Move(copy, Data(copy.source), reinterpret_cast<unsigned char*>(input->data.raw));
  return true;
}

bool Place(const Copy& copy) {
  const TfLiteTensor* output = interpreter->output(static_cast<std::size_t>(copy.source));
  if (!Fits(copy, output->bytes, kTensors[copy.target].bytes)) return false;
  Move(copy, reinterpret_cast<const unsigned char*>(output->data.raw), Data(copy.target));
  return true;
}

bool Run(const Segment& segment) {
  if (segment.model >= 0) {
    if (!Load(segment.model, segment.arena)) return false;
    for (int i = 0; i < segment.gather_count; ++i) {
      if (!Gather(segment.gathers[i])) return false;
    }
    if (interpreter->Invoke() != kTfLiteOk) return false;
    for (int i = 0; i < segment.place_count; ++i) {
      if (!Place(segment.places[i])) return false;
    }
    if (segment.frees_arena) Unload();
  }
  for (int i = 0; i < segment.copy_count; ++i) {
    const Copy& copy = segment.copies[i];
    if (!Fits(copy, kTensors[copy.source].bytes, kTensors[copy.target].bytes)) return false;
    Move(copy, Data(copy.source), Data(copy.target));
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
