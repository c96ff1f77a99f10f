// A transport over lines of bytes, one for each peer. A message on a line, all numbers little-endian:
//   'd' 'c'  index of the transfer (2 bytes)  length (4 bytes)  payload  CRC-32 of index, length and payload (4 bytes)
// Nothing is sent again: a message that is damaged ends the program.
#pragma once

#include <cstddef>
#include <cstdint>

#include "arena.h"
#include "transport.h"

namespace dicompiler {

class FramedTransport : public Transport {
 public:
  void Post(int incoming, void* data) final;
  bool Wait(int incoming) final;
  bool Send(int outgoing, const void* data) final;

 protected:
  ~FramedTransport() = default;

  // As many bytes as can be read or written without waiting: their number, or -1 where the line has ended.
  virtual long ReadSome(int peer, unsigned char* data, std::size_t bytes) = 0;
  virtual long WriteSome(int peer, const unsigned char* data, std::size_t bytes) = 0;

  // Called when nothing could be read or written: waits a little, or does nothing.
  virtual void Idle() {}

 private:
  static constexpr std::size_t kHead = 8, kTail = 4;

  // A message that is on its way in: how much of head, payload and tail is there; whether the line has ended.
  struct Line {
    unsigned char head[kHead];
    unsigned char tail[kTail];
    std::size_t got;
    int incoming;
    bool ended;
  };

  bool Write(int peer, const unsigned char* data, std::size_t bytes);
  bool Pump();
  bool PumpLine(int peer, bool* moved);
  int Find(int peer) const;

  Line lines_[kPeerSlots] = {};
  void* posted_[kIncomingSlots] = {};
  bool arrived_[kIncomingSlots] = {};
};

}  // namespace dicompiler
