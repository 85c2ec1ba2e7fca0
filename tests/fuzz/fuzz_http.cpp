// Any bytes as the answers of a server: to a small request, to a file's in parts, and to those for a
// repository of the hub. The first byte says which. The rest holds the answers, each after its length (u16,
// little-endian); each is sent on a connection of its own, which then ends. Nothing leaves this machine.
#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/files/temporary_folder.h"
#include "download/hub.h"

namespace {

class Server {
 public:
  Server() : listening_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    if (::bind(listening_, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
        ::listen(listening_, 16) != 0 ||
        ::getsockname(listening_, reinterpret_cast<sockaddr*>(&address), &length) != 0)
      std::abort();
    port_ = address.sin_port;
    std::thread([this] { serve(); }).detach();
  }

  in_port_t port() const { return port_; }  // in the order of the network
  std::string url() const { return "http://127.0.0.1:" + std::to_string(ntohs(port_)); }

  // What comes beyond these answers is cut at once.
  void answer_with(const uint8_t* data, size_t size) {
    const std::lock_guard lock(mutex_);
    answers_.clear();
    next_ = 0;
    while (size >= 2) {
      const size_t length = std::min<size_t>(data[0] | data[1] << 8, size - 2);
      answers_.emplace_back(reinterpret_cast<const char*>(data) + 2, length);
      data += 2 + length;
      size -= 2 + length;
    }
  }

 private:
  void serve() {
    for (;;) {
      const int client = ::accept(listening_, nullptr, nullptr);
      if (client < 0) continue;
      const timeval patience{.tv_sec = 0, .tv_usec = 200'000};
      ::setsockopt(client, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
      std::string answer;
      {
        const std::lock_guard lock(mutex_);
        if (next_ < answers_.size()) answer = answers_[next_++];
      }
      char request[1 << 14];
      if (::recv(client, request, sizeof request, 0) > 0)
        ::send(client, answer.data(), answer.size(), MSG_NOSIGNAL);
      ::shutdown(client, SHUT_WR);
      while (::recv(client, request, sizeof request, 0) > 0)
        continue;  // closing earlier would lose the answer
      ::close(client);
    }
  }

  int listening_;
  in_port_t port_ = 0;
  std::mutex mutex_;
  std::vector<std::string> answers_;
  size_t next_ = 0;
};

Server& server() {
  static Server& one = *new Server;
  return one;
}

}  // namespace

// A redirect to another host ends here: fuzzed names are neither looked up nor called.
extern "C" int getaddrinfo(const char*, const char*, const addrinfo*, addrinfo**) { return EAI_NONAME; }
extern "C" int connect(int fd, const sockaddr* address, socklen_t length) {
  const auto* to = reinterpret_cast<const sockaddr_in*>(address);
  if (address->sa_family == AF_INET && to->sin_addr.s_addr == htonl(INADDR_LOOPBACK) &&
      to->sin_port == server().port())
    return static_cast<int>(::syscall(SYS_connect, fd, address, length));
  errno = ECONNREFUSED;
  return -1;
}
// The pauses between tries; libFuzzer itself waits with sleep().
extern "C" int nanosleep(const timespec*, timespec*) { return 0; }

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  ::setenv("no_proxy", "*", 1);
  ::setenv("HF_ENDPOINT", server().url().c_str(), 1);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 1) return 0;
  const kiln::TemporaryFolder folder("fuzz");
  server().answer_with(data + 1, size - 1);
  try {
    switch (data[0] % 4) {
      case 0:
        kiln::fetch_text(server().url() + "/small", "token");
        break;
      case 1:
        kiln::fetch_file({.urls = {server().url() + "/file"}, .path = folder.path() / "a/file", .name = "a"});
        break;
      case 2:  // of a known size and hash
        kiln::fetch_file({.urls = {server().url() + "/file", server().url() + "/mirror"},
                          .path = folder.path() / "file",
                          .bytes = 5,
                          .sha256 = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824",
                          .name = "hello"});
        break;
      case 3:
        ::setenv("HF_HUB_CACHE", folder.path().c_str(), 1);
        kiln::fetch_from_hub({.repository = "org/name", .files = {"config.json", "unet/"}, .name = "name"});
        break;
    }
  } catch (const kiln::Error&) {
  } catch (const std::filesystem::filesystem_error&) {  // a listing of names that no disk takes
  }
  return 0;
}
