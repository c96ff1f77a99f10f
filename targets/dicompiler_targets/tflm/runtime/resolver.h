// The operators that this device's models use; resolver.cc, which is generated, registers just these.
#pragma once

#include "tensorflow/lite/micro/micro_op_resolver.h"

namespace dicompiler {

// The resolver, or null where an operator cannot be registered.
const tflite::MicroOpResolver* GetResolver();

}  // namespace dicompiler
