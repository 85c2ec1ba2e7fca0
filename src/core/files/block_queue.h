// The queue of a block store's requests to the disk, and two ways to serve it. Torch-free.
#pragma once
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

struct io_uring;

namespace kiln {

// How far a transfer is. Guarded by its queue's mutex.
struct BlockProgress {
  int64_t open_requests = 0;
};

struct BlockRequest {
  std::byte* data = nullptr;
  int64_t bytes = 0, offset = 0;
  bool writes = false;
  std::shared_ptr<BlockProgress> progress{};
};

// Thread-safe.
class BlockQueue {
 public:
  void push(std::vector<BlockRequest> requests);
  // Takes the oldest waiting requests, at most `most`. With `blocks` it waits for one; an empty result then
  // means that the queue is closed.
  std::vector<BlockRequest> take(size_t most, bool blocks);
  // Marks a request as done. `error`: empty for success.
  void finish(const BlockRequest& request, const std::string& error);
  // Waits until the transfer is done. Returns the first error of any transfer so far, or "".
  std::string wait(const BlockProgress& progress);
  void close();

 private:
  std::mutex mutex_;
  std::condition_variable arrived_, finished_;
  std::deque<BlockRequest> waiting_;
  std::string error_;
  bool closed_ = false;
};

// Notes that `result` bytes (or -errno) of a request are done. Returns true if the request is finished, false
// if the rest must be sent again.
bool advance(BlockRequest& request, int64_t result, BlockQueue& queue);

// Both serve the queue until it is closed and empty: serve_by_ring() in one thread with a ring of `depth`
// entries, serve_by_calls() in one of several threads with blocking calls.
void serve_by_ring(io_uring& ring, size_t depth, int fd, BlockQueue& queue);
void serve_by_calls(int fd, BlockQueue& queue);

}  // namespace kiln
