#include "framing.h"

namespace dicompiler {
namespace {

std::uint32_t UpdateCrc(std::uint32_t crc, const unsigned char* data, std::size_t bytes) {
  crc = ~crc;
  for (std::size_t i = 0; i < bytes; ++i) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (0xEDB88320u & (0u - (crc & 1u)));
  }
  return ~crc;
}

void PutInteger(unsigned char* data, std::uint32_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) data[i] = static_cast<unsigned char>(value >> (8 * i));
}

std::uint32_t GetInteger(const unsigned char* data, int bytes) {
  std::uint32_t value = 0;
  for (int i = 0; i < bytes; ++i) value |= static_cast<std::uint32_t>(data[i]) << (8 * i);
  return value;
}

}  // namespace

void FramedTransport::Post(int incoming, void* data) {
  posted_[incoming] = data;
  complete_[incoming] = false;
}

bool FramedTransport::Wait(int incoming) {
  while (!complete_[incoming]) {
    if (streams_[kIncoming[incoming].peer].ended || !ReceiveAll()) return false;
  }
  return true;
}

bool FramedTransport::Send(int outgoing, const void* data) {
  const Transfer& transfer = kOutgoing[outgoing];
  const std::size_t bytes = kTensors[transfer.tensor].bytes;
  const unsigned char* payload = static_cast<const unsigned char*>(data);
  unsigned char header[kHeaderBytes] = {'d', 'c'}, crc[kCrcBytes];
  PutInteger(header + 2, transfer.index, 2);
  PutInteger(header + 4, static_cast<std::uint32_t>(bytes), 4);
  PutInteger(crc, UpdateCrc(UpdateCrc(0, header + 2, kHeaderBytes - 2), payload, bytes), 4);
  return Write(transfer.peer, header, kHeaderBytes) && Write(transfer.peer, payload, bytes) &&
         Write(transfer.peer, crc, kCrcBytes);
}

// Writes all bytes, and receives meanwhile, because two peers that send to each other would block forever otherwise.
bool FramedTransport::Write(int peer, const unsigned char* data, std::size_t bytes) {
  while (bytes > 0) {
    const long count = WriteSome(peer, data, bytes);
    if (count < 0) return false;
    data += count;
    bytes -= static_cast<std::size_t>(count);
    if (count == 0 && !ReceiveAll()) return false;
  }
  return true;
}

bool FramedTransport::ReceiveAll() {
  bool progressed = false;
  for (int peer = 0; peer < kPeerCount; ++peer) {
    if (!ReceiveFrom(peer, &progressed)) return false;
  }
  if (!progressed) Idle();
  return true;
}

// Returns the incoming transfer that the peer's header announces, or -1 for an invalid header.
int FramedTransport::FindTransfer(int peer) const {
  const unsigned char* header = streams_[peer].header;
  if (header[0] != 'd' || header[1] != 'c') return -1;
  for (int i = 0; i < kIncomingCount; ++i) {
    const Transfer& transfer = kIncoming[i];
    if (transfer.peer == peer && transfer.index == GetInteger(header + 2, 2)) {
      return kTensors[transfer.tensor].bytes == GetInteger(header + 4, 4) ? i : -1;
    }
  }
  return -1;
}

// Receives a part of the peer's current message: of its header, its payload or its CRC.
bool FramedTransport::ReceiveFrom(int peer, bool* progressed) {
  Stream& stream = streams_[peer];
  if (stream.ended) return true;
  if (stream.received < kHeaderBytes) {
    const long count = ReadSome(peer, stream.header + stream.received, kHeaderBytes - stream.received);
    // A peer may end before this device does. That is a failure only if a tensor from it is still missing.
    stream.ended = count < 0;
    if (stream.ended) return true;
    stream.received += static_cast<std::size_t>(count);
    *progressed = *progressed || count > 0;
    if (stream.received < kHeaderBytes) return true;
    stream.incoming = FindTransfer(peer);
    if (stream.incoming < 0) return false;
  }
  const std::size_t bytes = kTensors[kIncoming[stream.incoming].tensor].bytes;
  // A tensor of the next frame stays in the stream until this frame no longer needs the buffer of the tensor.
  if (posted_[stream.incoming] == nullptr || complete_[stream.incoming]) return true;
  unsigned char* payload = static_cast<unsigned char*>(posted_[stream.incoming]);
  const std::size_t position = stream.received - kHeaderBytes;
  const long count = position < bytes
                         ? ReadSome(peer, payload + position, bytes - position)
                         : ReadSome(peer, stream.crc + (position - bytes), bytes + kCrcBytes - position);
  stream.ended = count < 0;
  if (stream.ended) return true;
  stream.received += static_cast<std::size_t>(count);
  *progressed = *progressed || count > 0;
  if (stream.received < kHeaderBytes + bytes + kCrcBytes) return true;
  const std::uint32_t crc = UpdateCrc(UpdateCrc(0, stream.header + 2, kHeaderBytes - 2), payload, bytes);
  if (GetInteger(stream.crc, 4) != crc) return false;
  complete_[stream.incoming] = true;
  stream.received = 0;
  return true;
}

}  // namespace dicompiler
