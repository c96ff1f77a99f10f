// How tensors go from device to device. One implementation is linked in: transport_posix.cc or transport_uart.cc, or
// one of your own.
#pragma once

#include <cstddef>

#include "program.h"

namespace dicompiler {

class Transport {
 public:
  // Connects to all peers. Returns whether that went well, as all functions here do.
  virtual bool Start(int argc, char** argv) = 0;

  // From now on the incoming transfer, an index of kIncoming, may be written to `data`.
  virtual void Post(int incoming, void* data) = 0;

  // Returns once the transfer is there.
  virtual bool Wait(int incoming) = 0;

  // Sends a transfer, an index of kOutgoing; what comes in meanwhile is received.
  virtual bool Send(int outgoing, const void* data) = 0;

 protected:
  ~Transport() = default;
};

// The transport that is linked in.
Transport& GetTransport();

}  // namespace dicompiler
