// Transport over TCP. Command line: PORT to listen on, then NAME=HOST:PORT for every peer with a lower number than this
// device; the others connect to this one.
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

constexpr int kTries = 300;
constexpr unsigned kPauseUs = 100000;

class PosixTransport final : public FramedTransport {
 public:
  bool Start(int argc, char** argv) override {
    for (int& line : sockets_) line = -1;
    if (kPeerCount == 0) return true;
    if (argc < 2) {
      std::fprintf(stderr, "usage: %s PORT [NAME=HOST:PORT ...]\n", argv[0]);
      return false;
    }
    const int door = Listen(argv[1]);
    if (door < 0) return Fail("cannot listen on", argv[1]);
    int expected = 0;
    for (int peer = 0; peer < kPeerCount; ++peer) {
      if (kPeerDevices[peer] > kDevice) {
        ++expected;
      } else if (!Connect(peer, argc, argv)) {
        return Fail("cannot connect to", kPeerNames[peer]);
      }
    }
    for (; expected > 0; --expected) {
      if (!Accept(door)) return Fail("no connection from", "a peer");
    }
    close(door);
    return true;
  }

 private:
  static bool Fail(const char* what, const char* whom) {
    std::fprintf(stderr, "%s %s\n", what, whom);
    return false;
  }

  static int Listen(const char* port) {
    unsigned number = 0;
    if (std::sscanf(port, "%u", &number) != 1 || number > 65535) return -1;
    const int door = socket(AF_INET, SOCK_STREAM, 0);
    const int yes = 1;
    setsockopt(door, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(number));
    address.sin_addr.s_addr = htonl(INADDR_ANY);
    const bool bound = bind(door, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
    return bound && listen(door, kPeerSlots) == 0 ? door : -1;
  }

  // Peers may start later than this device: tries again for a while. Then says who it is.
  bool Connect(int peer, int argc, char** argv) {
    const std::size_t length = std::strlen(kPeerNames[peer]);
    for (int i = 2; i < argc; ++i) {
      if (std::strncmp(argv[i], kPeerNames[peer], length) != 0 || argv[i][length] != '=') continue;
      char host[256];
      const char* place = argv[i] + length + 1;
      const char* colon = std::strrchr(place, ':');
      if (colon == nullptr || static_cast<std::size_t>(colon - place) >= sizeof host) return false;
      std::memcpy(host, place, static_cast<std::size_t>(colon - place));
      host[colon - place] = '\0';
      for (int tried = 0; tried < kTries; ++tried, usleep(kPauseUs)) {
        const int line = Dial(host, colon + 1);
        if (line < 0) continue;
        const unsigned char self[2] = {static_cast<unsigned char>(kDevice & 255),
                                       static_cast<unsigned char>(kDevice >> 8)};
        if (write(line, self, 2) == 2) return Keep(peer, line);
        close(line);
      }
    }
    return false;
  }

  static int Dial(const char* host, const char* port) {
    addrinfo hints = {}, *found = nullptr;
    hints.ai_family = AF_INET;
    hints.ai_socktype = SOCK_STREAM;
    if (getaddrinfo(host, port, &hints, &found) != 0) return -1;
    const int line = socket(AF_INET, SOCK_STREAM, 0);
    const bool there = connect(line, found->ai_addr, found->ai_addrlen) == 0;
    freeaddrinfo(found);
    if (there) return line;
    close(line);
    return -1;
  }

  bool Accept(int door) {
    const int line = accept(door, nullptr, nullptr);
    unsigned char who[2];
    if (line < 0 || recv(line, who, 2, MSG_WAITALL) != 2) return false;
    for (int peer = 0; peer < kPeerCount; ++peer) {
      if (kPeerDevices[peer] == who[0] + 256 * who[1] && sockets_[peer] < 0) return Keep(peer, line);
    }
    return false;
  }

  bool Keep(int peer, int line) {
    const int yes = 1;
    setsockopt(line, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    sockets_[peer] = line;
    return fcntl(line, F_SETFL, O_NONBLOCK) == 0;
  }

  static long Counted(ssize_t count, bool reading) {
    if (count > 0) return static_cast<long>(count);
    if (count == 0) return reading ? -1 : 0;
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : -1;
  }

  long ReadSome(int peer, unsigned char* data, std::size_t bytes) override {
    return Counted(recv(sockets_[peer], data, bytes, 0), true);
  }

  long WriteSome(int peer, const unsigned char* data, std::size_t bytes) override {
    return Counted(send(sockets_[peer], data, bytes, MSG_NOSIGNAL), false);
  }

  void Idle() override {
    pollfd waiting[kPeerSlots] = {};
    for (int peer = 0; peer < kPeerCount; ++peer) {
      waiting[peer].fd = sockets_[peer];
      waiting[peer].events = POLLIN;
    }
    poll(waiting, static_cast<nfds_t>(kPeerCount), 1);
  }

  int sockets_[kPeerSlots];
};

}  // namespace

Transport& GetTransport() {
  static PosixTransport transport;
  return transport;
}

}  // namespace dicompiler
