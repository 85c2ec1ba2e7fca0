#include "parallel/ranks/connection.h"

#include <dlfcn.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

// Replaces the C library's function, and returns numbers. c10d asks for the name of every address that it
// connects to, for messages that are not shown. That takes seconds if no name server answers.
extern "C" int getnameinfo(const sockaddr* address, socklen_t size, char* host, socklen_t host_size,
                           char* service, socklen_t service_size, int flags) {
  static const auto next = reinterpret_cast<decltype(&getnameinfo)>(dlsym(RTLD_NEXT, "getnameinfo"));
  return next(address, size, host, host_size, service, service_size, flags | NI_NUMERICHOST);
}

namespace kiln {

namespace {

// Returns the address of this machine that packets to `host` leave from. Empty if `host` is unknown or is a
// loopback name of this machine. Nothing is sent.
std::string own_address_towards(const std::string& host) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_DGRAM;
  if (getaddrinfo(host.c_str(), "9", &hints, &found) != 0) return "";
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> addresses(found, &freeaddrinfo);
  const int probe = socket(found->ai_family, SOCK_DGRAM, 0);
  if (probe < 0) return "";
  sockaddr_storage own{};
  socklen_t size = sizeof own;
  auto* address = reinterpret_cast<sockaddr*>(&own);
  char name[NI_MAXHOST] = "";
  if (connect(probe, found->ai_addr, found->ai_addrlen) == 0 && getsockname(probe, address, &size) == 0)
    getnameinfo(address, size, name, sizeof name, nullptr, 0, NI_NUMERICHOST);
  close(probe);
  const std::string text = name;
  return text.starts_with("127.") || text == "::1" ? "" : text;
}

// Gloo's own default is the address of the host name, which on Debian is a loopback one.
std::shared_ptr<gloo::transport::Device> network_device(const Ranks& ranks) {
  if (const char* interface = std::getenv("GLOO_SOCKET_IFNAME"))
    return c10d::ProcessGroupGloo::createDeviceForInterface(interface);
  if (ranks.local_world_size == ranks.world_size)
    return c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1");
  const std::string address = own_address_towards(ranks.master_addr);
  return address.empty() ? c10d::ProcessGroupGloo::createDefaultDevice()
                         : c10d::ProcessGroupGloo::createDeviceForHostname(address);
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> open_gloo(c10::intrusive_ptr<c10d::Store> store, const Ranks& members,
                                            const Ranks& all, std::chrono::milliseconds patience) {
  auto options = c10d::ProcessGroupGloo::Options::create(patience);
  options->devices.push_back(network_device(all));
  return c10::make_intrusive<c10d::ProcessGroupGloo>(std::move(store), static_cast<int>(members.rank),
                                                     static_cast<int>(members.world_size), options);
}

}  // namespace kiln
