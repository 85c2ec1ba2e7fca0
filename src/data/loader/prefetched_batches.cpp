#include "data/loader/prefetched_batches.h"

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

#include "core/error.h"

namespace kiln {

std::shared_ptr<Batch> BatchPool::take() {
  std::unique_ptr<Batch> batch;
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      batch = std::move(free_.back());
      free_.pop_back();
    }
  }
  if (!batch) batch = std::make_unique<Batch>();
  return {batch.release(), [pool = weak_from_this()](Batch* used) {
            std::unique_ptr<Batch> owned(used);
            if (const auto alive = pool.lock()) alive->give_back(std::move(owned));
          }};
}

void BatchPool::give_back(std::unique_ptr<Batch> batch) {
  const std::lock_guard lock(mutex_);
  free_.push_back(std::move(batch));
}

PrefetchedBatches::PrefetchedBatches(Fill fill, SampleOrder order, const BatchOptions& options)
    : fill_(std::move(fill)),
      order_(std::move(order)),
      global_batch_(options.global_batch),
      num_threads_(std::max(options.num_threads, 1)),
      slots_(std::max<int64_t>(options.prefetch, 1)) {}

PrefetchedBatches::~PrefetchedBatches() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  slot_free_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

// Called at the first next(), because batches made before a seek() would be thrown away.
void PrefetchedBatches::start_workers() {
  for (int i = 0; i < num_threads_; ++i) try {
      workers_.emplace_back([this] { work(); });
    } catch (const std::system_error&) {  // the system's limit on threads: go on with fewer
      if (workers_.empty()) throw;
      break;
    }
}

void PrefetchedBatches::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    slot_free_.wait(
        lock, [this] { return stopping_ || claimed_ < delivered_ + static_cast<int64_t>(slots_.size()); });
    if (stopping_) return;
    const int64_t number = claimed_++, generation = generation_;
    const int64_t first_position = start_ + number * global_batch_;
    lock.unlock();
    Slot made;
    made.filled = true;
    try {
      const std::shared_ptr<Batch> batch = pool_->take();
      fill_(first_position, *batch);
      made.batch = batch;
    } catch (...) {
      made.error = std::current_exception();
    }
    lock.lock();
    if (generation != generation_) continue;
    slots_[number % slots_.size()] = std::move(made);
    slot_filled_.notify_one();
  }
}

std::shared_ptr<const Batch> PrefetchedBatches::next() {
  std::unique_lock lock(mutex_);
  if (workers_.empty()) start_workers();
  Slot& slot = slots_[delivered_ % slots_.size()];
  if (!slot.filled) {
    const auto begin = std::chrono::steady_clock::now();
    slot_filled_.wait(lock, [&] { return slot.filled; });
    stall_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  // A failed batch stays where it is: every further call reports the same error.
  if (slot.error) std::rethrow_exception(slot.error);
  std::shared_ptr<const Batch> batch = std::move(slot.batch);
  slot = Slot{};
  ++delivered_;
  lock.unlock();
  slot_free_.notify_one();
  return batch;
}

void PrefetchedBatches::seek(int64_t images_seen) {
  if (images_seen < 0) fail("loader", "expected a position from 0 on, got {}", images_seen);
  {
    const std::lock_guard lock(mutex_);
    ++generation_;
    start_ = images_seen;
    claimed_ = delivered_ = 0;
    for (Slot& slot : slots_) slot = Slot{};
  }
  slot_free_.notify_all();
}

double PrefetchedBatches::take_stall_seconds() {
  const std::lock_guard lock(mutex_);
  return std::exchange(stall_seconds_, 0.0);
}

int64_t PrefetchedBatches::ready() const {
  const std::lock_guard lock(mutex_);
  return std::count_if(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.filled; });
}

}  // namespace kiln
