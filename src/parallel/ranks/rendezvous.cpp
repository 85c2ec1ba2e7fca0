#include "parallel/ranks/rendezvous.h"

#include <fmt/ranges.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "core/error.h"
#include "parallel/ranks/rendezvous_store.h"

namespace kiln {

namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kLoopback = "127.0.0.1";

// Makes writing to a peer that is gone an error instead of a signal. The rendezvous server writes to sockets
// without asking for that, and the signal would end this process without a message.
void ignore_broken_pipes() {
  struct sigaction present {};
  if (sigaction(SIGPIPE, nullptr, &present) == 0 && present.sa_handler == SIG_DFL) signal(SIGPIPE, SIG_IGN);
}

// Returns a socket on this machine's own address, which no other machine reaches: c10d would listen on all
// addresses. Port 0: a free one. c10d takes it over.
int loopback_socket(int64_t port) {
  const int bound = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), yes = 1;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ::setsockopt(bound, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  if (bound < 0 || ::bind(bound, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    const int error = errno;
    if (bound >= 0) ::close(bound);
    fail("ranks", "cannot listen on {}:{}: {}", kLoopback, port, std::strerror(error));
  }
  return bound;
}

std::string store_prefix(const std::string& attempt) { return "kiln/" + attempt; }
constexpr const char* kHere = "yes";
std::string arrival_key_of(int64_t rank) { return fmt::format("here/{}", rank); }

class StoreBoard : public NoticeBoard {
 public:
  explicit StoreBoard(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}
  void set(const std::string& key, const std::string& value) override { store_->set(key, value); }
  std::optional<std::string> find(const std::string& key) override {
    if (!store_->check({key})) return std::nullopt;
    const std::vector<uint8_t> value = store_->get(key);
    return std::string(value.begin(), value.end());
  }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace

struct Rendezvous::Server {
  c10::intrusive_ptr<c10d::TCPStore> store;
  std::shared_ptr<NoticeBoard> board;
};

Rendezvous::Rendezvous(const std::string& secret) {
  ignore_broken_pipes();
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  options.masterListenFd = loopback_socket(/*port=*/0);
  auto store = c10::make_intrusive<c10d::TCPStore>(kLoopback, options);
  const std::string attempt = "0";  // it launches once
  auto board =
      std::make_shared<StoreBoard>(c10::make_intrusive<c10d::PrefixStore>(store_prefix(attempt), store));
  server_ =
      std::make_unique<Server>(Server{std::move(store), signed_board(std::move(board), secret, attempt)});
}
Rendezvous::~Rendezvous() = default;
int64_t Rendezvous::port() const { return server_->store->getPort(); }
bool Rendezvous::has_reported_failure(int64_t rank) const {
  return server_->board->find(failure_key_of(rank)).has_value();
}

c10::intrusive_ptr<c10d::Store> open_store(const Ranks& ranks, std::chrono::milliseconds timeout) {
  ignore_broken_pipes();
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(ranks.master_port);
  options.isServer = ranks.rank == 0 && !ranks.launcher_hosts;
  options.waitWorkers = false;
  options.timeout = timeout;
  if (options.isServer && (ranks.master_addr == kLoopback || ranks.master_addr == "localhost"))
    options.masterListenFd = loopback_socket(ranks.master_port);
  auto store = c10::make_intrusive<c10d::TCPStore>(ranks.master_addr, options);
  return c10::make_intrusive<c10d::PrefixStore>(store_prefix(ranks.attempt), store);
}

void meet(c10d::Store& store, const Ranks& ranks, std::chrono::milliseconds patience) {
  constexpr std::chrono::milliseconds kFirstPause(10), kLongestPause(500), kMoreOfTheHost(2000);
  const bool hosts = ranks.rank == 0 && !ranks.launcher_hosts;
  const Clock::time_point deadline =
      Clock::now() + patience + (hosts ? kMoreOfTheHost : std::chrono::milliseconds(0));
  std::vector<std::string> keys;
  for (int64_t rank = 0; rank < ranks.world_size; ++rank) keys.push_back(arrival_key_of(rank));
  const auto board = notice_board(store, ranks);
  board->set(keys[static_cast<size_t>(ranks.rank)], kHere);
  for (auto pause = kFirstPause; !store.check(keys); pause = std::min(2 * pause, kLongestPause)) {
    if (Clock::now() < deadline) {
      std::this_thread::sleep_for(pause);
      continue;
    }
    std::vector<int64_t> absent;
    for (int64_t rank = 0; rank < ranks.world_size; ++rank)
      if (!store.check({arrival_key_of(rank)})) absent.push_back(rank);
    if (absent.empty()) break;
    fail("ranks", "rank{} {} did not come within {:g} s: find out why, and start all ranks together",
         absent.size() == 1 ? "" : "s", fmt::join(absent, ", "),
         std::chrono::duration<double>(patience).count());
  }
  // Rank 0 looks at all, the others at rank 0.
  const size_t first = ranks.rank == 0 ? 1 : 0, end = ranks.rank == 0 ? keys.size() : 1;
  for (size_t rank = first; rank < end; ++rank)
    if (board->find(keys[rank]) != kHere)
      fail("ranks", "rank {} has another secret than this rank: give all ranks the same KILN_JOB_SECRET",
           rank);
}

std::shared_ptr<NoticeBoard> notice_board(c10d::Store& store, const Ranks& ranks) {
  return signed_board(std::make_shared<StoreBoard>(store.clone()), ranks.secret, ranks.attempt);
}

}  // namespace kiln
