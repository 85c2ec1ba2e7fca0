#include "parallel/ranks/rendezvous.h"

#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "core/error.h"
#include "core/text/some_of.h"
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
constexpr const char *kJobKey = "job", *kHere = "yes";
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

// The board of one job: its name, which rank 0 draws, enters every tag. A notice that somebody has copied
// from an earlier job with the same secret does not count.
std::shared_ptr<NoticeBoard> board_of_job(const std::shared_ptr<NoticeBoard>& open_board,
                                          const std::string& secret, const std::string& attempt,
                                          const std::string& job) {
  return signed_board(open_board, secret, fmt::format("{}/{}", attempt, job));
}

constexpr const char* kOnlyAttempt = "0";  // of the ranks that this process launches

}  // namespace

struct Rendezvous::Server {
  c10::intrusive_ptr<c10d::TCPStore> store;
  std::shared_ptr<NoticeBoard> board;  // unsigned
  std::string secret = random_secret();
};

Rendezvous::Rendezvous() {
  ignore_broken_pipes();
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  options.masterListenFd = loopback_socket(/*port=*/0);
  auto store = c10::make_intrusive<c10d::TCPStore>(kLoopback, options);
  auto board =
      std::make_shared<StoreBoard>(c10::make_intrusive<c10d::PrefixStore>(store_prefix(kOnlyAttempt), store));
  server_ = std::make_unique<Server>(Server{.store = std::move(store), .board = std::move(board)});
}
Rendezvous::~Rendezvous() = default;
int64_t Rendezvous::port() const { return server_->store->getPort(); }
const std::string& Rendezvous::secret() const { return server_->secret; }
bool Rendezvous::has_reported_failure(int64_t rank) const {
  const auto& [store, board, secret] = *server_;
  const auto job = signed_board(board, secret, kOnlyAttempt)->find(kJobKey);
  return job && board_of_job(board, secret, kOnlyAttempt, *job)->find(failure_key_of(rank));
}

c10::intrusive_ptr<c10d::Store> open_store(const Ranks& ranks, std::chrono::milliseconds timeout) {
  ignore_broken_pipes();
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(ranks.master_port);
  options.isServer = ranks.rank == 0 && !ranks.launcher_hosts;
  options.waitWorkers = false;
  options.timeout = timeout;
  if (options.isServer && is_on_loopback(ranks)) options.masterListenFd = loopback_socket(ranks.master_port);
  auto store = c10::make_intrusive<c10d::TCPStore>(ranks.master_addr, options);
  return c10::make_intrusive<c10d::PrefixStore>(store_prefix(ranks.attempt), store);
}

bool is_on_loopback(const Ranks& ranks) {
  return !ranks.launcher_hosts && (ranks.master_addr == kLoopback || ranks.master_addr == "localhost");
}

std::shared_ptr<NoticeBoard> meet(c10d::Store& store, const Ranks& ranks,
                                  std::chrono::milliseconds patience) {
  constexpr std::chrono::milliseconds kFirstPause(2), kLongestPause(500), kMoreOfTheHost(2000);
  constexpr std::chrono::seconds kPuzzling(5);  // ranks with one secret agree long before
  const bool hosts = ranks.rank == 0 && !ranks.launcher_hosts;
  const Clock::time_point warning_at = Clock::now() + kPuzzling;
  const Clock::time_point deadline =
      Clock::now() + patience + (hosts ? kMoreOfTheHost : std::chrono::milliseconds(0));
  std::vector<std::string> keys;
  for (int64_t rank = 0; rank < ranks.world_size; ++rank) keys.push_back(arrival_key_of(rank));
  const std::shared_ptr<NoticeBoard> open_board = std::make_shared<StoreBoard>(store.clone());
  std::string job = ranks.rank == 0 ? random_secret() : "";
  bool has_warned = false;
  // What a rank says is said again with every look: a stranger may have written over it.
  for (auto pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
    const auto naming = signed_board(open_board, ranks.secret, ranks.attempt);
    if (ranks.rank == 0)
      naming->set(kJobKey, job);
    else
      job = naming->find(kJobKey).value_or("");
    auto board = board_of_job(open_board, ranks.secret, ranks.attempt, job);
    board->set(keys[static_cast<size_t>(ranks.rank)], kHere);
    const bool is_over = Clock::now() >= deadline;
    std::vector<int64_t> absent;
    std::optional<int64_t> strange;
    if (store.check(keys)) {
      // Rank 0 looks at all, the others at rank 0.
      const int64_t first = ranks.rank == 0 ? 1 : 0, end = ranks.rank == 0 ? ranks.world_size : 1;
      for (int64_t rank = first; rank < end && !strange; ++rank)
        if (board->find(keys[static_cast<size_t>(rank)]) != kHere) strange = rank;
      if (!strange) return board;
    } else if (is_over) {
      for (int64_t rank = 0; rank < ranks.world_size; ++rank)
        if (!store.check({keys[static_cast<size_t>(rank)]})) absent.push_back(rank);
    }
    if (is_over && !absent.empty())
      fail("ranks", "rank{} {} did not come within {:g} s: find out why, and start all ranks together",
           absent.size() == 1 ? "" : "s", some_of(absent), std::chrono::duration<double>(patience).count());
    if (strange && (is_over || (!has_warned && Clock::now() >= warning_at))) {
      const std::string what = fmt::format(
          "rank {} has another secret than rank {}, or a stranger came in its place: give all ranks the same "
          "KILN_JOB_SECRET",
          *strange, ranks.rank);
      if (is_over) fail("ranks", "{}", what);
      fmt::print(stderr, "warning: {}; waiting for one with the same secret\n", what);
      has_warned = true;
    }
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace kiln
