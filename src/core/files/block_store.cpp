#include "core/files/block_store.h"

#include <fcntl.h>
#include <liburing.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
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

}  // namespace kiln
