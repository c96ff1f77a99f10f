// The operators that this device's models use. The generated resolver.cc registers exactly these.
#pragma once

#include "tensorflow/lite/micro/micro_op_resolver.h"

namespace dicompiler {

// Returns null if an operator cannot be registered.
const tflite::MicroOpResolver* GetResolver();

}  // namespace dicompiler
