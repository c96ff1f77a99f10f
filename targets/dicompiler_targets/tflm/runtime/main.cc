// The main program of a device: sets up, then computes one frame (inference request) after another. It is the same for
// all devices; they differ in program.cc, resolver.cc, arena.h and the models.
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
alignas(tflite::MicroInterpreter) unsigned char interpreter_memory[sizeof(tflite::MicroInterpreter)];
tflite::MicroInterpreter* interpreter = nullptr;
int loaded_model = -1;

unsigned char* GetData(int tensor) { return memory + kTensors[tensor].offset; }

// Destroys the interpreter. Its destructor accesses the arena, so only afterwards other data may use this memory.
void Unload() {
  if (interpreter != nullptr) interpreter->~MicroInterpreter();
  interpreter = nullptr;
  loaded_model = -1;
}

// Creates the interpreter of a model in the model's arena. If the model is loaded already, its interpreter is kept.
bool Load(int model, std::size_t arena_offset) {
  if (model == loaded_model) return true;
  Unload();
  const tflite::MicroOpResolver* resolver = GetResolver();
  if (resolver == nullptr) return false;
  const tflite::Model* root = tflite::GetModel(kModels[model].data);
  if (root->version() != 3) return false;
  interpreter = new (interpreter_memory)
      tflite::MicroInterpreter(root, *resolver, memory + arena_offset, kModels[model].arena_bytes);
  if (interpreter->AllocateTensors() != kTfLiteOk) return false;
  loaded_model = model;
  return true;
}

// Waits for those inputs of a segment that peers send.
bool ReceiveInputs(const Segment& segment) {
  for (int i = 0; i < kIncomingCount; ++i) {
    for (int k = 0; k < segment.input_count; ++k) {
      if (kIncoming[i].tensor == segment.inputs[k] && !GetTransport().Wait(i)) return false;
    }
  }
  return true;
}

// Returns true if the copy is within the source and the target.
bool IsInside(const Copy& copy, std::size_t source_bytes, std::size_t target_bytes) {
  std::size_t source_end = copy.source_offset + copy.run_bytes, target_end = copy.target_offset + copy.run_bytes;
  for (int i = 0; i < 3; ++i) {
    source_end += (copy.counts[i] - 1) * copy.source_strides[i];
    target_end += (copy.counts[i] - 1) * copy.target_strides[i];
  }
  return source_end <= source_bytes && target_end <= target_bytes;
}

void MakeCopy(const Copy& copy, const unsigned char* source, unsigned char* target) {
  source += copy.source_offset;
  target += copy.target_offset;
  const std::size_t* const from = copy.source_strides;
  const std::size_t* const to = copy.target_strides;
  for (std::size_t i = 0; i < copy.counts[0]; ++i) {
    for (std::size_t j = 0; j < copy.counts[1]; ++j) {
      for (std::size_t k = 0; k < copy.counts[2]; ++k) {
        std::memcpy(target + i * to[0] + j * to[1] + k * to[2], source + i * from[0] + j * from[1] + k * from[2],
                    copy.run_bytes);
      }
    }
  }
}

bool CopyToInput(const Copy& copy) {
  TfLiteTensor* input = interpreter->input(static_cast<std::size_t>(copy.target));
  if (!IsInside(copy, kTensors[copy.source].bytes, input->bytes)) return false;
  MakeCopy(copy, GetData(copy.source), reinterpret_cast<unsigned char*>(input->data.raw));
  return true;
}

bool CopyFromOutput(const Copy& copy) {
  const TfLiteTensor* output = interpreter->output(static_cast<std::size_t>(copy.source));
  if (!IsInside(copy, output->bytes, kTensors[copy.target].bytes)) return false;
  MakeCopy(copy, reinterpret_cast<const unsigned char*>(output->data.raw), GetData(copy.target));
  return true;
}

bool Run(const Segment& segment) {
  if (segment.model >= 0) {
    if (!Load(segment.model, segment.arena_offset)) return false;
    for (int i = 0; i < segment.input_copy_count; ++i) {
      if (!CopyToInput(segment.input_copies[i])) return false;
    }
    if (interpreter->Invoke() != kTfLiteOk) return false;
    for (int i = 0; i < segment.output_copy_count; ++i) {
      if (!CopyFromOutput(segment.output_copies[i])) return false;
    }
    if (segment.frees_arena) Unload();
  }
  for (int i = 0; i < segment.tensor_copy_count; ++i) {
    const Copy& copy = segment.tensor_copies[i];
    if (!IsInside(copy, kTensors[copy.source].bytes, kTensors[copy.target].bytes)) return false;
    MakeCopy(copy, GetData(copy.source), GetData(copy.target));
  }
  return true;
}

bool SetUp(int argc, char** argv) {
  tflite::InitializeTarget();
  return GetTransport().Start(argc, argv);
}

enum class FrameResult { kDone, kNoMoreFrames, kFailed };

// Computes one frame. There are no more frames when the inputs of the network, or the peers, have ended.
FrameResult ProcessFrame() {
  for (int i = 0; i < kIncomingCount; ++i) GetTransport().Post(i, GetData(kIncoming[i].tensor));
  for (int i = 0; i < kInputCount; ++i) {
    const int tensor = kInputs[i].tensor;
    if (!ReadInput(kInputs[i].index, GetData(tensor), kTensors[tensor].bytes)) return FrameResult::kNoMoreFrames;
  }
  for (int i = 0; i < kStepCount; ++i) {
    const Step& step = kSteps[i];
    if (step.kind == StepKind::kRun) {
      const Segment& segment = kSegments[step.index];
      // A device without inputs of the network ends when the peers that it receives from have ended.
      if (!ReceiveInputs(segment)) return kInputCount == 0 ? FrameResult::kNoMoreFrames : FrameResult::kFailed;
      if (!Run(segment)) return FrameResult::kFailed;
    } else if (!GetTransport().Send(step.index, GetData(kOutgoing[step.index].tensor))) {
      return FrameResult::kFailed;
    }
  }
  for (int i = 0; i < kOutputCount; ++i) {
    const int tensor = kOutputs[i].tensor;
    if (!WriteOutput(kOutputs[i].index, GetData(tensor), kTensors[tensor].bytes)) return FrameResult::kFailed;
  }
  return FrameResult::kDone;
}

}  // namespace
}  // namespace dicompiler

int main(int argc, char** argv) {
  if (!dicompiler::SetUp(argc, argv)) return 1;
  dicompiler::FrameResult result = dicompiler::FrameResult::kDone;
  while (result == dicompiler::FrameResult::kDone) result = dicompiler::ProcessFrame();
  return result == dicompiler::FrameResult::kNoMoreFrames ? 0 : 1;
}
