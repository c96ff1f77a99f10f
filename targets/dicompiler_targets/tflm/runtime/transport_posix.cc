// A transport over TCP. Command line: PORT to listen on, then NAME=HOST:PORT for every peer with a lower number than
// this device. The other peers connect to this device.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "framing.h"

namespace dicompiler {
namespace {

constexpr int kConnectAttempts = 300;
constexpr unsigned kConnectPauseUs = 100000;

class PosixTransport final : public FramedTransport {
 public:
  bool Start(int argc, char** argv) override {
    for (int& descriptor : sockets_) descriptor = -1;
    if (kPeerCount == 0) return true;
    if (argc < 2) {
      std::fprintf(stderr, "usage: %s PORT [NAME=HOST:PORT ...]\n", argv[0]);
      return false;
    }
    const int listener = Listen(argv[1]);
    if (listener < 0) return Fail("cannot listen on", argv[1]);
    int expected = 0;
    for (int peer = 0; peer < kPeerCount; ++peer) {
      if (kPeerDevices[peer] > kDevice) {
        ++expected;
      } else if (!Connect(peer, argc, argv)) {
        return Fail("cannot connect to", kPeerNames[peer]);
      }
    }
    for (; expected > 0; --expected) {
      if (!Accept(listener)) return Fail("no connection from", "a peer");
    }
    close(listener);
    return true;
  }

 private:
  static bool Fail(const char* problem, const char* name) {
    std::fprintf(stderr, "%s %s\n", problem, name);
    return false;
  }

  static int Listen(const char* port) {
    unsigned number = 0;
    if (std::sscanf(port, "%u", &number) != 1 || number > 65535) return -1;
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    const int enable = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &enable, sizeof enable);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(number));
    address.sin_addr.s_addr = htonl(INADDR_ANY);
    const bool bound = bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
    return bound && listen(listener, kPeerSlots) == 0 ? listener : -1;
  }

  // Connects to a peer, which may start later, and sends this device's number.
  bool Connect(int peer, int argc, char** argv) {
    const std::size_t length = std::strlen(kPeerNames[peer]);
    for (int i = 2; i < argc; ++i) {
      if (std::strncmp(argv[i], kPeerNames[peer], length) != 0 || argv[i][length] != '=') continue;
      char host[256];
      const char* address = argv[i] + length + 1;
      const char* colon = std::strrchr(address, ':');
      if (colon == nullptr || static_cast<std::size_t>(colon - address) >= sizeof host) return false;
      std::memcpy(host, address, static_cast<std::size_t>(colon - address));
      host[colon - address] = '\0';
      for (int attempt = 0; attempt < kConnectAttempts; ++attempt, usleep(kConnectPauseUs)) {
        const int descriptor = Dial(host, colon + 1);
        if (descriptor < 0) continue;
        const unsigned char self[2] = {static_cast<unsigned char>(kDevice & 255),
                                       static_cast<unsigned char>(kDevice >> 8)};
        if (write(descriptor, self, 2) == 2) return Store(peer, descriptor);
        close(descriptor);
      }
    }
    return false;
  }

  static int Dial(const char* host, const char* port) {
    addrinfo hints = {}, *found = nullptr;
    hints.ai_family = AF_INET;
    hints.ai_socktype = SOCK_STREAM;
    if (getaddrinfo(host, port, &hints, &found) != 0) return -1;
    const int descriptor = socket(AF_INET, SOCK_STREAM, 0);
    const bool connected = connect(descriptor, found->ai_addr, found->ai_addrlen) == 0;
    freeaddrinfo(found);
    if (connected) return descriptor;
    close(descriptor);
    return -1;
  }

  bool Accept(int listener) {
    const int descriptor = accept(listener, nullptr, nullptr);
    unsigned char device[2];
    if (descriptor < 0 || recv(descriptor, device, 2, MSG_WAITALL) != 2) return false;
    for (int peer = 0; peer < kPeerCount; ++peer) {
      if (kPeerDevices[peer] == device[0] + 256 * device[1] && sockets_[peer] < 0) return Store(peer, descriptor);
    }
    return false;
  }

  bool Store(int peer, int descriptor) {
    const int enable = 1;
    setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &enable, sizeof enable);
    sockets_[peer] = descriptor;
    return fcntl(descriptor, F_SETFL, O_NONBLOCK) == 0;
  }

  // Converts the result of recv or send to that of ReadSome or WriteSome.
  static long ToByteCount(ssize_t count, bool reading) {
    if (count > 0) return static_cast<long>(count);
    if (count == 0) return reading ? -1 : 0;
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : -1;
  }

  long ReadSome(int peer, unsigned char* data, std::size_t bytes) override {
    return ToByteCount(recv(sockets_[peer], data, bytes, 0), true);
  }

  long WriteSome(int peer, const unsigned char* data, std::size_t bytes) override {
    return ToByteCount(send(sockets_[peer], data, bytes, MSG_NOSIGNAL), false);
  }

  void Idle() override {
    pollfd polled[kPeerSlots] = {};
    for (int peer = 0; peer < kPeerCount; ++peer) {
      polled[peer].fd = sockets_[peer];
      polled[peer].events = POLLIN;
    }
    poll(polled, static_cast<nfds_t>(kPeerCount), 1);
  }

  int sockets_[kPeerSlots];
};

}  // namespace

Transport& GetTransport() {
  static PosixTransport transport;
  return transport;
}

}  // namespace dicompiler
