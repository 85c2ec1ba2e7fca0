// Batches made ahead of time by worker threads, delivered in order, their buffers recycled. Torch-free.
#pragma once
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "data/loader/batch.h"

namespace kiln {

// Keeps batches that nobody owns any more for their next use, because fresh memory costs a page fault per 4
// KiB.
class BatchPool : public std::enable_shared_from_this<BatchPool> {
 public:
  // Returns a batch with unspecified content. It goes back to the pool when the last pointer to it is
  // destroyed. The pool may be destroyed before.
  std::shared_ptr<Batch> take();

 private:
  void give_back(std::unique_ptr<Batch> batch);

  std::mutex mutex_;
  std::vector<std::unique_ptr<Batch>> free_;
};

// Batch k of the stream begins at position start + k * global_batch. Thread-safe against its own workers;
// only one thread may call next() and seek().
class PrefetchedBatches : public BatchSource {
 public:
  // Fills the batch of the samples at positions [first_position, first_position + global_batch). A pure
  // function that several threads call.
  using Fill = std::function<void(int64_t first_position, Batch& batch)>;

  PrefetchedBatches(Fill fill, SampleOrder order, const BatchOptions& options);
  ~PrefetchedBatches() override;

  std::shared_ptr<const Batch> next() override;
  void seek(int64_t images_seen) override;
  const SampleOrder& order() const override { return order_; }
  double take_stall_seconds() override;
  int64_t ready() const override;

 private:
  struct Slot {
    std::shared_ptr<const Batch> batch;
    std::exception_ptr error;
    bool filled = false;
  };
  void start_workers();
  void work();

  const Fill fill_;
  const SampleOrder order_;
  const int64_t global_batch_;
  const int num_threads_;
  const std::shared_ptr<BatchPool> pool_ = std::make_shared<BatchPool>();

  mutable std::mutex mutex_;
  std::condition_variable slot_free_, slot_filled_;
  std::vector<Slot> slots_;  // batch k is in slot k % size
  int64_t start_ = 0;        // position of batch 0
  int64_t claimed_ = 0, delivered_ = 0;
  int64_t generation_ = 0;  // counts calls of seek(); workers drop batches of older ones
  bool stopping_ = false;
  double stall_seconds_ = 0;
  std::vector<std::thread> workers_;
};

}  // namespace kiln
