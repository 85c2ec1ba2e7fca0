#include "core/files/block_store.h"

#include <fcntl.h>
#include <liburing.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <utility>

#include "core/error.h"
#include "core/files/file_system.h"
#include "core/units.h"

namespace kiln {

namespace {

constexpr int64_t kMostCallThreads = 16;

struct RingCloser {
  void operator()(io_uring* ring) const {
    io_uring_queue_exit(ring);
    delete ring;
  }
};

// Opens a ring that can read and write. Returns "", or why there is none.
std::string open_ring(unsigned depth, std::unique_ptr<io_uring, RingCloser>& opened) {
  auto ring = std::make_unique<io_uring>();
  const int result = io_uring_queue_init(depth, ring.get(), 0);
  if (result < 0) return std::strerror(-result);
  opened.reset(ring.release());
  io_uring_probe* probe = io_uring_get_probe_ring(opened.get());
  const bool usable = probe && io_uring_opcode_supported(probe, IORING_OP_READ) &&
                      io_uring_opcode_supported(probe, IORING_OP_WRITE);
  if (probe) io_uring_free_probe(probe);
  return usable ? "" : "reads and writes are not supported";
}

constexpr int64_t kSector = 512;  // the rest of a request must begin at a multiple of it

// Fails all requests until the queue is closed, so that nobody waits for ever.
void refuse_all(BlockQueue& queue, const std::string& error) {
  while (true) {
    const std::vector<BlockRequest> taken = queue.take(1, /*blocks=*/true);
    if (taken.empty()) return;
    queue.finish(taken.front(), error);
  }
}

}  // namespace

BlockTransfer::BlockTransfer(BlockQueue& queue, std::shared_ptr<BlockProgress> progress)
    : queue_(&queue), progress_(std::move(progress)) {}

BlockTransfer& BlockTransfer::operator=(BlockTransfer&& other) noexcept {
  if (this != &other) {
    const BlockTransfer finished(std::move(*this));
    queue_ = other.queue_;
    progress_ = std::move(other.progress_);
  }
  return *this;
}

BlockTransfer::~BlockTransfer() {
  if (progress_) queue_->wait(*progress_);
}

void BlockTransfer::wait() {
  if (!progress_) return;
  const std::shared_ptr<BlockProgress> progress = std::move(progress_);
  const std::string error = queue_->wait(*progress);
  if (!error.empty())
    fail("nvme", "the disk of --nvme-path failed ({}): the newest checkpoint is untouched, resume from it",
         error);
}

BlockStore::BlockStore(int64_t bytes, const BlockStoreOptions& options) : options_(options) {
  open_file();
  try {
    take_space(bytes);
    start_workers();
  } catch (...) {
    stop();
    throw;
  }
}

BlockStore::~BlockStore() { stop(); }

void BlockStore::stop() {
  queue_.close();
  for (std::thread& worker : workers_) worker.join();
  close(fd_);
}

void BlockStore::open_file() {
  static std::atomic<int64_t> number = 0;
  const std::string path = fmt::format("{}/.kiln-state-{}-{}", options_.folder, getpid(), number++);
  constexpr int kFlags = O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC;
  if (options_.bypass_page_cache) {
    fd_ = open(path.c_str(), kFlags | O_DIRECT, 0600);
    if (fd_ < 0 && errno == EINVAL) {
      unlink(path.c_str());  // some file systems create it before they refuse
      options_.bypass_page_cache = false;
      notes_.push_back(fmt::format("{} does not take O_DIRECT: offloaded state goes through the page cache",
                                   options_.folder));
    }
  }
  if (!options_.bypass_page_cache) fd_ = open(path.c_str(), kFlags, 0600);
  if (fd_ < 0)
    fail("nvme", "--nvme-path expects a folder that exists and can be written to, got {} ({})",
         options_.folder, std::strerror(errno));
  unlink(path.c_str());
}

void BlockStore::take_space(int64_t bytes) {
  struct statvfs disk {};
  const double free_bytes = fstatvfs(fd_, &disk) == 0
                                ? static_cast<double>(disk.f_bavail) * static_cast<double>(disk.f_frsize)
                                : static_cast<double>(bytes);
  const auto refuse = [&](const char* reason) {
    fail("nvme",
         "{} has {:.1f} GiB free, the offloaded state needs {:.1f} GiB ({}): free some space or give "
         "another --nvme-path",
         options_.folder, free_bytes / kGiB, static_cast<double>(bytes) / kGiB, reason);
  };
  // Checked first: a file system may fill the disk before it notices.
  if (free_bytes < static_cast<double>(bytes)) refuse(std::strerror(ENOSPC));
  if (const int error = reserve_file_space(fd_, bytes)) refuse(std::strerror(error));
}

void BlockStore::start_workers() {
  if (options_.use_io_uring) {
    const auto depth = static_cast<unsigned>(options_.queue_depth);
    std::unique_ptr<io_uring, RingCloser> ring;
    const std::string refusal = open_ring(depth, ring);
    if (refusal.empty()) {
      workers_.emplace_back(
          [this, depth, ring = std::move(ring)] { serve_by_ring(*ring, depth, fd_, queue_); });
      return;
    }
    notes_.push_back(
        fmt::format("io_uring is not available ({}): offloaded state is read and written by "
                    "threads",
                    refusal));
  }
  for (int64_t i = 0; i < std::min(options_.queue_depth, kMostCallThreads); ++i)
    workers_.emplace_back([this] { serve_by_calls(fd_, queue_); });
}

BlockTransfer BlockStore::start(std::byte* data, int64_t bytes, int64_t offset, bool writes) {
  const auto misaligned = [](auto value) { return value % kAlignment != 0; };
  if (misaligned(reinterpret_cast<uintptr_t>(data)) || misaligned(bytes) || misaligned(offset))
    throw std::logic_error("block store: addresses, sizes and offsets must be multiples of kAlignment");
  (writes ? bytes_written_ : bytes_read_) += bytes;
  auto progress = std::make_shared<BlockProgress>();
  std::vector<BlockRequest> requests;
  for (int64_t done = 0; done < bytes; done += options_.block_bytes)
    requests.push_back({.data = data + done,
                        .bytes = std::min(options_.block_bytes, bytes - done),
                        .offset = offset + done,
                        .writes = writes,
                        .progress = progress});
  progress->open_requests = static_cast<int64_t>(requests.size());
  queue_.push(std::move(requests));
  return {queue_, std::move(progress)};
}

BlockTransfer BlockStore::read(std::span<std::byte> to, int64_t offset) {
  return start(to.data(), static_cast<int64_t>(to.size()), offset, /*writes=*/false);
}

BlockTransfer BlockStore::write(std::span<const std::byte> from, int64_t offset) {
  return start(const_cast<std::byte*>(from.data()), static_cast<int64_t>(from.size()), offset,
               /*writes=*/true);
}

void BlockQueue::push(std::vector<BlockRequest> requests) {
  {
    const std::lock_guard lock(mutex_);
    std::ranges::move(requests, std::back_inserter(waiting_));
  }
  arrived_.notify_all();
}

std::vector<BlockRequest> BlockQueue::take(size_t most, bool blocks) {
  std::unique_lock lock(mutex_);
  if (blocks) arrived_.wait(lock, [&] { return closed_ || !waiting_.empty(); });
  const auto end = waiting_.begin() + static_cast<int64_t>(std::min(most, waiting_.size()));
  std::vector<BlockRequest> taken(std::move_iterator(waiting_.begin()), std::move_iterator(end));
  waiting_.erase(waiting_.begin(), end);
  return taken;
}

void BlockQueue::finish(const BlockRequest& request, const std::string& error) {
  const std::lock_guard lock(mutex_);
  if (error_.empty()) error_ = error;
  if (--request.progress->open_requests == 0) finished_.notify_all();
}

std::string BlockQueue::wait(const BlockProgress& progress) {
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [&] { return progress.open_requests == 0; });
  return error_;
}

void BlockQueue::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  arrived_.notify_all();
}

bool advance(BlockRequest& request, int64_t result, BlockQueue& queue) {
  if (result == -EINTR || result == -EAGAIN) return false;
  if (result == request.bytes) {
    queue.finish(request, "");
    return true;
  }
  if (result > 0 && result % kSector == 0) {
    request.data += result;
    request.offset += result;
    request.bytes -= result;
    return false;
  }
  queue.finish(request, fmt::format("{} {} bytes at {}: {}", request.writes ? "writing" : "reading",
                                    request.bytes, request.offset,
                                    result < 0 ? std::strerror(static_cast<int>(-result))
                                               : fmt::format("only {} came, the file ends early", result)));
  return true;
}

void serve_by_ring(io_uring& ring, size_t depth, int fd, BlockQueue& queue) {
  std::vector<BlockRequest> requests(depth);
  std::vector<size_t> idle(depth);  // indices into `requests`
  std::iota(idle.begin(), idle.end(), size_t{0});
  const auto send = [&](size_t index) {
    const BlockRequest& request = requests[index];
    io_uring_sqe* entry = io_uring_get_sqe(&ring);  // never null: the ring has an entry for each request
    const auto bytes = static_cast<unsigned>(request.bytes);
    if (request.writes)
      io_uring_prep_write(entry, fd, request.data, bytes, static_cast<uint64_t>(request.offset));
    else
      io_uring_prep_read(entry, fd, request.data, bytes, static_cast<uint64_t>(request.offset));
    io_uring_sqe_set_data64(entry, index);
  };
  while (true) {
    for (BlockRequest& request : queue.take(idle.size(), /*blocks=*/idle.size() == depth)) {
      requests[idle.back()] = std::move(request);
      send(idle.back());
      idle.pop_back();
    }
    if (idle.size() == depth) return;
    // If the wait is interrupted, nothing is found below, and the loop waits again.
    const int submitted = io_uring_submit_and_wait(&ring, 1);
    if (submitted < 0 && submitted != -EINTR && submitted != -EAGAIN && submitted != -EBUSY) {
      const std::string error = fmt::format("io_uring: {}", std::strerror(-submitted));
      for (size_t index = 0; index < depth; ++index)
        if (std::ranges::find(idle, index) == idle.end()) queue.finish(requests[index], error);
      return refuse_all(queue, error);
    }
    io_uring_cqe* done = nullptr;
    while (io_uring_peek_cqe(&ring, &done) == 0) {
      const size_t index = io_uring_cqe_get_data64(done);
      const int result = done->res;
      io_uring_cqe_seen(&ring, done);
      if (advance(requests[index], result, queue))
        idle.push_back(index);
      else
        send(index);
    }
  }
}

void serve_by_calls(int fd, BlockQueue& queue) {
  while (true) {
    std::vector<BlockRequest> taken = queue.take(1, /*blocks=*/true);
    if (taken.empty()) return;
    BlockRequest& request = taken.front();
    int64_t result = 0;
    do {
      const auto bytes = static_cast<size_t>(request.bytes);
      result = request.writes ? pwrite(fd, request.data, bytes, request.offset)
                              : pread(fd, request.data, bytes, request.offset);
      if (result < 0) result = -errno;
    } while (!advance(request, result, queue));
  }
}

}  // namespace kiln
