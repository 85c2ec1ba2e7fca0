#include "core/threads/pieces.h"

#include <algorithm>
#include <atomic>
#include <climits>
#include <exception>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "core/threads/waiting.h"

namespace kiln {
namespace {

// False while this thread runs pieces. It begins as true, for that gives every program a thread-local
// variable with a first value: mold before 2.4 can put the others outside the pages that a program maps, and
// the loader then refuses to start it (https://github.com/rui314/mold/issues/1151).
thread_local bool may_share = true;

// Threads that help one caller at a time with its pieces. What different threads write lies on lines of the
// cache of its own.
class Helpers {  // NOLINT(clang-analyzer-optin.performance.Padding)
 public:
  // Starts as many as are missing. Returns how many there are: the system's limit on threads may stop it.
  uint32_t start(uint32_t wanted) {
    for (; num_helpers_ < wanted; ++num_helpers_) try {
        std::thread([this, helper = num_helpers_] { help(helper); }).detach();
      } catch (const std::system_error&) {
        break;
      }
    return num_helpers_;
  }

  void run(uint32_t count, uint32_t threads, PieceWork work) {
    start(threads - 1);
    count_ = count;
    work_ = work;
    num_done_.store(0, std::memory_order_relaxed);
    offered_.store(uint64_t{threads - 1} << 32 | count, std::memory_order_release);
    num_offers_.fetch_add(1);
    const bool may_all_help = num_helpers_ < threads;  // else those may wake that may not
    if (num_sleeping_.load() > 0)
      wake_sleepers(num_offers_, may_all_help ? static_cast<int>(std::min(count, threads)) - 1 : INT_MAX);
    may_share = false;
    while (take_piece(/*helper=*/0)) {
    }
    may_share = true;
    wait_for_pieces();
    if (const std::exception_ptr error = std::exchange(error_, nullptr)) std::rethrow_exception(error);
  }

 private:
  // Takes the next piece and runs it. A helper that comes late finds that nothing is left, or takes a piece
  // of the next offer: it reads count_ and work_ only with a piece in hand, without which no offer ends.
  bool take_piece(uint32_t helper) {
    uint64_t offer = offered_.load(std::memory_order_acquire);
    do {
      if (static_cast<uint32_t>(offer) == 0 || helper >= offer >> 32) return false;
    } while (!offered_.compare_exchange_weak(offer, offer - 1, std::memory_order_acq_rel,
                                             std::memory_order_acquire));
    const uint32_t count = count_;
    try {
      (*work_)(count - static_cast<uint32_t>(offer));
    } catch (...) {
      const std::lock_guard lock(error_mutex_);
      if (!error_) error_ = std::current_exception();
    }
    if (num_done_.fetch_add(1) + 1 == count && is_awaited_.load()) wake_sleepers(num_done_, 1);
    return true;
  }

  void wait_for_pieces() {
    const auto are_done = [&] { return num_done_.load(std::memory_order_acquire) == count_; };
    if (spin_until(are_done)) return;
    is_awaited_.store(true);
    for (uint32_t done = num_done_.load(); done != count_; done = num_done_.load())
      sleep_while(num_done_, done);
    is_awaited_.store(false);
  }

  void help(uint32_t helper) {
    may_share = false;
    for (;;) {
      const uint32_t seen = num_offers_.load();
      while (take_piece(helper)) {
      }
      const auto is_offered = [&] { return num_offers_.load(std::memory_order_acquire) != seen; };
      if (spin_until(is_offered)) continue;
      num_sleeping_.fetch_add(1);
      sleep_while(num_offers_, seen);
      num_sleeping_.fetch_sub(1);
    }
  }

  uint32_t num_helpers_ = 0;
  uint32_t count_ = 0;
  std::optional<PieceWork> work_;
  std::mutex error_mutex_;
  std::exception_ptr error_;
  // The number of helpers that may take pieces, and in the lower half that of the pieces which are left.
  alignas(64) std::atomic<uint64_t> offered_{0};
  alignas(64) WaitWord num_done_{0};
  std::atomic<bool> is_awaited_{false};
  alignas(64) WaitWord num_offers_{0};
  WaitWord num_sleeping_{0};
};

// The helpers that work for nobody. Each caller takes some: most programs have one caller at a time.
class IdleHelpers {
 public:
  Helpers* take() {
    const std::lock_guard lock(mutex_);
    if (idle_.empty()) return new Helpers;  // never deleted: its threads sleep until the process ends
    Helpers* const taken = idle_.back();
    idle_.pop_back();
    return taken;
  }
  void give_back(Helpers* helpers) {
    const std::lock_guard lock(mutex_);
    idle_.push_back(helpers);
  }

 private:
  std::mutex mutex_;
  std::vector<Helpers*> idle_;
};

// Helpers for the time of one work.
class LentHelpers {
 public:
  LentHelpers() : helpers_(idle().take()) {}
  ~LentHelpers() { idle().give_back(helpers_); }
  LentHelpers(const LentHelpers&) = delete;
  Helpers* operator->() const { return helpers_; }

 private:
  static IdleHelpers& idle() {
    static auto* const kIdle = new IdleHelpers;  // outlives threads that end late
    return *kIdle;
  }
  Helpers* helpers_;
};

}  // namespace

void run_pieces(int64_t count, int64_t threads, PieceWork work) {
  if (threads > 1 && count > 1 && may_share)
    return LentHelpers()->run(static_cast<uint32_t>(count), static_cast<uint32_t>(threads), work);
  for (int64_t piece = 0; piece < count; ++piece) work(piece);
}

bool run_together(int64_t threads, PieceWork work) {
  if (!may_share) return false;
  if (threads == 1) return work(0), true;
  const LentHelpers helpers;
  if (helpers->start(static_cast<uint32_t>(threads - 1)) < threads - 1)
    throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again),
                            "starting a thread");
  helpers->run(static_cast<uint32_t>(threads), static_cast<uint32_t>(threads), work);
  return true;
}

}  // namespace kiln
