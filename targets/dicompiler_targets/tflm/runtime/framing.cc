#include "framing.h"

namespace dicompiler {
namespace {

std::uint32_t Crc(std::uint32_t crc, const unsigned char* data, std::size_t bytes) {
  crc = ~crc;
  for (std::size_t i = 0; i < bytes; ++i) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (0xEDB88320u & (0u - (crc & 1u)));
  }
  return ~crc;
}

void Put(unsigned char* to, std::uint32_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) to[i] = static_cast<unsigned char>(value >> (8 * i));
}

std::uint32_t Get(const unsigned char* from, int bytes) {
  std::uint32_t value = 0;
  for (int i = 0; i < bytes; ++i) value |= static_cast<std::uint32_t>(from[i]) << (8 * i);
  return value;
}

}  // namespace

void FramedTransport::Post(int incoming, void* data) {
  posted_[incoming] = data;
  arrived_[incoming] = false;
}

bool FramedTransport::Wait(int incoming) {
  while (!arrived_[incoming]) {
    if (lines_[kIncoming[incoming].peer].ended || !Pump()) return false;
  }
  return true;
}

bool FramedTransport::Send(int outgoing, const void* data) {
  const Transfer& transfer = kOutgoing[outgoing];
  const std::size_t bytes = kTensors[transfer.tensor].bytes;
  const unsigned char* payload = static_cast<const unsigned char*>(data);
  unsigned char head[kHead] = {'d', 'c'}, tail[kTail];
  Put(head + 2, transfer.index, 2);
  Put(head + 4, static_cast<std::uint32_t>(bytes), 4);
  Put(tail, Crc(Crc(0, head + 2, kHead - 2), payload, bytes), 4);
  return Write(transfer.peer, head, kHead) && Write(transfer.peer, payload, bytes) &&
         Write(transfer.peer, tail, kTail);
}

// Peers that both send to each other must both receive meanwhile, or both would wait for ever.
bool FramedTransport::Write(int peer, const unsigned char* data, std::size_t bytes) {
  while (bytes > 0) {
    const long count = WriteSome(peer, data, bytes);
    if (count < 0) return false;
    data += count;
    bytes -= static_cast<std::size_t>(count);
    if (count == 0 && !Pump()) return false;
  }
  return true;
}

bool FramedTransport::Pump() {
  bool moved = false;
  for (int peer = 0; peer < kPeerCount; ++peer) {
    if (!PumpLine(peer, &moved)) return false;
  }
  if (!moved) Idle();
  return true;
}

// The incoming transfer whose head has come from the peer, or -1.
int FramedTransport::Find(int peer) const {
  const unsigned char* head = lines_[peer].head;
  if (head[0] != 'd' || head[1] != 'c') return -1;
  for (int i = 0; i < kIncomingCount; ++i) {
    const Transfer& transfer = kIncoming[i];
    if (transfer.peer == peer && transfer.index == Get(head + 2, 2)) {
      return kTensors[transfer.tensor].bytes == Get(head + 4, 4) ? i : -1;
    }
  }
  return -1;
}

bool FramedTransport::PumpLine(int peer, bool* moved) {
  Line& line = lines_[peer];
  if (line.ended) return true;
  if (line.got < kHead) {
    const long count = ReadSome(peer, line.head + line.got, kHead - line.got);
    // A peer may end before this device does; it matters where something is still to come from it.
    line.ended = count < 0;
    if (line.ended) return true;
    line.got += static_cast<std::size_t>(count);
    *moved = *moved || count > 0;
    if (line.got < kHead) return true;
    line.incoming = Find(peer);
    if (line.incoming < 0) return false;
  }
  const std::size_t bytes = kTensors[kIncoming[line.incoming].tensor].bytes;
  // One of the next frame waits on the line until this frame is done with the buffer.
  if (posted_[line.incoming] == nullptr || arrived_[line.incoming]) return true;
  unsigned char* payload = static_cast<unsigned char*>(posted_[line.incoming]);
  const std::size_t at = line.got - kHead;
  const long count = at < bytes ? ReadSome(peer, payload + at, bytes - at)
                                : ReadSome(peer, line.tail + (at - bytes), bytes + kTail - at);
  line.ended = count < 0;
  if (line.ended) return true;
  line.got += static_cast<std::size_t>(count);
  *moved = *moved || count > 0;
  if (line.got < kHead + bytes + kTail) return true;
  if (Get(line.tail, 4) != Crc(Crc(0, line.head + 2, kHead - 2), payload, bytes)) return false;
  arrived_[line.incoming] = true;
  line.got = 0;
  return true;
}

}  // namespace dicompiler
