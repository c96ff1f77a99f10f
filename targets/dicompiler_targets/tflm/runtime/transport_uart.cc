// A transport over serial ports, one for each peer in the order of kPeerNames. Write the three functions below for your
// board; they must not block.
#include "framing.h"

// Opens the serial port to a peer. Returns false on failure.
extern "C" bool UartStart(int port);
// Reads up to `bytes` received bytes. Returns their number; 0 if there are none.
extern "C" std::size_t UartRead(int port, unsigned char* data, std::size_t bytes);
// Writes up to `bytes` bytes. Returns how many the port has accepted.
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
