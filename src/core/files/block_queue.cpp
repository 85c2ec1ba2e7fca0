#include "core/files/block_queue.h"

#include <fmt/format.h>
#include <liburing.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <utility>

namespace kiln {

namespace {

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
