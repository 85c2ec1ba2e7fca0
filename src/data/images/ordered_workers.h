// Worker threads that compute f(first), f(first + 1), ... ahead of a reader, delivered in order. Torch-free.
#pragma once
#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <vector>

namespace kiln {

template <class Result>
class OrderedWorkers {
 public:
  // `work` runs in several threads at once. At most `depth` results (at least one per thread) exist ahead of
  // next().
  OrderedWorkers(int64_t first, int64_t last, int num_threads, int64_t depth,
                 std::function<Result(int64_t)> work)
      : work_(std::move(work)), last_(last), next_input_(first), next_output_(first) {
    num_threads = std::max(num_threads, 1);
    slots_.resize(std::max<int64_t>(depth, num_threads));
    for (int i = 0; i < num_threads; ++i) try {
        threads_.emplace_back([this] { run(); });
      } catch (const std::system_error&) {  // the system's limit on threads: go on with fewer
        if (threads_.empty()) throw;
        break;
      }
  }
  // Waits only for the calls of `work` that are running.
  ~OrderedWorkers() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    has_room_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  OrderedWorkers(const OrderedWorkers&) = delete;
  OrderedWorkers& operator=(const OrderedWorkers&) = delete;

  // Returns the next result in order, none at the end. Rethrows what `work` threw for it.
  std::optional<Result> next() {
    std::unique_lock lock(mutex_);
    if (next_output_ >= last_) return std::nullopt;
    Slot& slot = slot_of(next_output_);
    is_ready_.wait(lock, [&] { return slot.is_full; });
    Slot taken = std::move(slot);
    slot = Slot{};
    ++next_output_;
    lock.unlock();
    has_room_.notify_one();
    if (taken.error) std::rethrow_exception(taken.error);
    return std::move(taken.result);
  }

 private:
  struct Slot {
    bool is_full = false;
    std::optional<Result> result;
    std::exception_ptr error;
  };

  Slot& slot_of(int64_t index) { return slots_[index % static_cast<int64_t>(slots_.size())]; }

  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      has_room_.wait(lock, [&] {
        return stopping_ || next_input_ >= last_ ||
               next_input_ - next_output_ < static_cast<int64_t>(slots_.size());
      });
      if (stopping_ || next_input_ >= last_) return;
      const int64_t index = next_input_++;
      lock.unlock();
      Slot done{true, std::nullopt, nullptr};
      try {
        done.result = work_(index);
      } catch (...) {
        done.error = std::current_exception();
      }
      lock.lock();
      slot_of(index) = std::move(done);
      if (index == next_output_) is_ready_.notify_one();
    }
  }

  const std::function<Result(int64_t)> work_;
  const int64_t last_;
  std::mutex mutex_;
  std::condition_variable has_room_, is_ready_;
  int64_t next_input_, next_output_;  // guarded by mutex_, like all members below
  bool stopping_ = false;
  std::vector<Slot> slots_;
  std::vector<std::thread> threads_;
};

}  // namespace kiln
