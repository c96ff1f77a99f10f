// Transport over serial lines, a port for each peer in the order of kPeerNames. Write the three functions below for
// your board; they must not wait.
#include "framing.h"

// Opens the serial line to a peer; returns whether that went well.
extern "C" bool UartStart(int port);
// Takes up to `bytes` bytes that have come in: their number, 0 where there are none.
extern "C" std::size_t UartRead(int port, unsigned char* data, std::size_t bytes);
// Gives up to `bytes` bytes to the line: how many of them it took.
extern "C" std::size_t UartWrite(int port, const unsigned char* data, std::size_t bytes);

namespace dicompiler {
namespace {

class UartTransport final : public FramedTransport {
 public:
  bool Start(int, char**) override {
    for (int peer = 0; peer < kPeerCount; ++peer) {
      if (!UartStart(peer)) return false;
    }
    return true;
  }

 private:
  long ReadSome(int peer, unsigned char* data, std::size_t bytes) override {
    return static_cast<long>(UartRead(peer, data, bytes));
  }

  long WriteSome(int peer, const unsigned char* data, std::size_t bytes) override {
    return static_cast<long>(UartWrite(peer, data, bytes));
  }
};

}  // namespace

Transport& GetTransport() {
  static UartTransport transport;
  return transport;
}

}  // namespace dicompiler
