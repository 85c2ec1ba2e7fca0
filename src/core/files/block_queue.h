// Requests of a block store on their way to the disk, and the two ways there. Torch-free.
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

// How far a transfer is. Guarded by its queue.
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
  // The oldest waiting requests, `most` at most. Where `blocks`, waits for one; empty then means closed.
  std::vector<BlockRequest> take(size_t most, bool blocks);
  // `error`: empty for success.
  void finish(const BlockRequest& request, const std::string& error);
  // Waits until the transfer is done; the first thing that went wrong with it or any other before, or empty.
  std::string wait(const BlockProgress& progress);
  void close();

 private:
  std::mutex mutex_;
  std::condition_variable arrived_, finished_;
  std::deque<BlockRequest> waiting_;
  std::string error_;
  bool closed_ = false;
};

// Notes that `result` bytes (or -errno) of a request are done. True when it is finished, false when the rest
// is to be sent again.
bool advance(BlockRequest& request, int64_t result, BlockQueue& queue);

// Serve the queue until it is closed and empty: one thread with a ring of `depth` entries, or several with
// blocking calls.
void serve_by_ring(io_uring& ring, size_t depth, int fd, BlockQueue& queue);
void serve_by_calls(int fd, BlockQueue& queue);

}  // namespace kiln
