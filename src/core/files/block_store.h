// Memory on a disk: one file that is read and written in blocks in the background, with io_uring and O_DIRECT
// if the system has them. Torch-free.
#pragma once
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
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

struct BlockStoreOptions {
  std::string folder;             // must exist
  int64_t queue_depth = 32;       // requests under way at once
  int64_t block_bytes = 1 << 20;  // per request; a multiple of BlockStore::kAlignment
  bool use_io_uring = true;       // false: threads with pread and pwrite, as when the kernel refuses
  bool bypass_page_cache = true;  // false: buffered, as when the file system refuses O_DIRECT
};

// A read or write under way. Its memory must stay until wait() has returned. The destructor waits too.
class BlockTransfer {
 public:
  BlockTransfer() = default;  // nothing to wait for
  ~BlockTransfer();
  BlockTransfer(BlockTransfer&&) noexcept = default;
  BlockTransfer& operator=(BlockTransfer&&) noexcept;

  // Throws Error if the disk failed or the file ended early, in this transfer or an earlier one. Nothing that
  // is read from the store can be trusted afterwards.
  void wait();

 private:
  friend class BlockStore;
  BlockTransfer(BlockQueue& queue, std::shared_ptr<BlockProgress> progress);
  BlockQueue* queue_ = nullptr;
  std::shared_ptr<BlockProgress> progress_;
};

// The file is unlinked right after it is created, so nothing is left behind however the process ends.
class BlockStore {
 public:
  static constexpr int64_t kAlignment = 4096;  // of addresses, offsets and sizes
  static constexpr int64_t kMostQueueDepth = 4096, kMostBlockBytes = 1 << 30;

  // Takes all the space at once. REQUIRES: a possible queue depth and block size. Throws Error if the folder
  // does not exist or is not writable, or if the disk is full.
  BlockStore(int64_t bytes, const BlockStoreOptions& options);
  ~BlockStore();  // waits for all requests. REQUIRES: no BlockTransfer outlives it
  BlockStore(const BlockStore&) = delete;

  // Reading where nothing was written gives zeros. Transfers run in any order: wait for one before another
  // touches its part of the file.
  BlockTransfer read(std::span<std::byte> to, int64_t offset);
  BlockTransfer write(std::span<const std::byte> from, int64_t offset);

  // What the system refused and is done another way instead, one line each.
  const std::vector<std::string>& notes() const { return notes_; }
  int64_t bytes_read() const { return bytes_read_; }  // requested so far
  int64_t bytes_written() const { return bytes_written_; }

 private:
  void open_file();
  void take_space(int64_t bytes);
  void start_workers();
  void stop();
  BlockTransfer start(std::byte* data, int64_t bytes, int64_t offset, bool writes);

  BlockStoreOptions options_;
  std::vector<std::string> notes_;
  int fd_ = -1;
  int64_t bytes_read_ = 0, bytes_written_ = 0;
  BlockQueue queue_;
  std::vector<std::thread> workers_;
};

}  // namespace kiln
