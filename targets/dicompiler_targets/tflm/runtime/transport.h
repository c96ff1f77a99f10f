// The interface by which devices exchange tensors. One implementation is linked in: transport_posix.cc,
// transport_uart.cc, or your own. All functions that return bool return false on failure.
#pragma once

#include <cstddef>

#include "program.h"

namespace dicompiler {

class Transport {
 public:
  // Connects to all peers.
  virtual bool Start(int argc, char** argv) = 0;

  // From now on, the transport may write the incoming transfer `incoming` (an index of kIncoming) to `data`.
  virtual void Post(int incoming, void* data) = 0;

  // Waits until the incoming transfer is complete.
  virtual bool Wait(int incoming) = 0;

  // Sends a transfer (an index of kOutgoing), and receives other transfers meanwhile.
  virtual bool Send(int outgoing, const void* data) = 0;

 protected:
  ~Transport() = default;
};

// Returns the transport that is linked in.
Transport& GetTransport();

}  // namespace dicompiler
