#include "parallel/ranks/rendezvous.h"

#include <fmt/ranges.h>
#include <signal.h>

#include <algorithm>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "core/error.h"
#include "parallel/ranks/rendezvous_store.h"

namespace kiln {

namespace {

using Clock = std::chrono::steady_clock;

// Makes writing to a peer that is gone an error instead of a signal. The rendezvous server writes to sockets
// without asking for that, and the signal would end this process without a message.
void ignore_broken_pipes() {
  struct sigaction present {};
  if (sigaction(SIGPIPE, nullptr, &present) == 0 && present.sa_handler == SIG_DFL) signal(SIGPIPE, SIG_IGN);
}

std::string store_prefix(const std::string& attempt) { return "kiln/" + attempt; }
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
};

Rendezvous::Rendezvous() {
  ignore_broken_pipes();
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  server_ = std::make_unique<Server>(Server{c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options)});
}
Rendezvous::~Rendezvous() = default;
int64_t Rendezvous::port() const { return server_->store->getPort(); }
bool Rendezvous::has_reported_failure(int64_t rank) const {
  return c10d::PrefixStore(store_prefix(/*attempt=*/"0"), server_->store).check({failure_key_of(rank)});
}

c10::intrusive_ptr<c10d::Store> open_store(const Ranks& ranks, std::chrono::milliseconds timeout) {
  ignore_broken_pipes();
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(ranks.master_port);
  options.isServer = ranks.rank == 0 && !ranks.launcher_hosts;
  options.waitWorkers = false;
  options.timeout = timeout;
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
  store.set(keys[static_cast<size_t>(ranks.rank)], std::string("yes"));
  for (auto pause = kFirstPause; !store.check(keys); pause = std::min(2 * pause, kLongestPause)) {
    if (Clock::now() < deadline) {
      std::this_thread::sleep_for(pause);
      continue;
    }
    std::vector<int64_t> absent;
    for (int64_t rank = 0; rank < ranks.world_size; ++rank)
      if (!store.check({arrival_key_of(rank)})) absent.push_back(rank);
    if (absent.empty()) return;
    fail("ranks", "rank{} {} did not come within {:g} s: find out why, and start all ranks together",
         absent.size() == 1 ? "" : "s", fmt::join(absent, ", "),
         std::chrono::duration<double>(patience).count());
  }
}

std::shared_ptr<NoticeBoard> notice_board(c10d::Store& store) {
  return std::make_shared<StoreBoard>(store.clone());
}

}  // namespace kiln
