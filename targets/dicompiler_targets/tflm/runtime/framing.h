// A transport over byte streams, one for each peer. A message on a stream, all integers little-endian:
//   'd' 'c'  index of the transfer (2 bytes)  length (4 bytes)  payload  CRC-32 of index, length and payload (4 bytes)
// Damaged messages are not sent again; they end the program.
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

  // Read or write as many bytes as possible without blocking. Return their number, or -1 if the stream has ended.
  virtual long ReadSome(int peer, unsigned char* data, std::size_t bytes) = 0;
  virtual long WriteSome(int peer, const unsigned char* data, std::size_t bytes) = 0;

  // Is called if nothing could be read or written. It may wait for a short time.
  virtual void Idle() {}

 private:
  static constexpr std::size_t kHeaderBytes = 8, kCrcBytes = 4;

  // The incoming stream of a peer: the message that is being received, and its number of bytes so far.
  struct Stream {
    unsigned char header[kHeaderBytes];
    unsigned char crc[kCrcBytes];
    std::size_t received;
    int incoming;
    bool ended;
  };

  bool Write(int peer, const unsigned char* data, std::size_t bytes);
  bool ReceiveAll();
  bool ReceiveFrom(int peer, bool* progressed);
  int FindTransfer(int peer) const;

  Stream streams_[kPeerSlots] = {};
  void* posted_[kIncomingSlots] = {};
  bool complete_[kIncomingSlots] = {};
};

}  // namespace dicompiler
