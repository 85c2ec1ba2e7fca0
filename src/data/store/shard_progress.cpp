#include "data/store/shard_progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>

#include "core/units.h"

namespace kiln {

ShardProgress::ShardProgress(std::string verb, int64_t total)
    : verb_(std::move(verb)),
      total_(total),
      is_terminal_(::isatty(2) == 1),
      start_(Clock::now()),
      last_(start_) {}

ShardProgress::~ShardProgress() {
  if (is_open_) fmt::print(stderr, "\n");
}

void ShardProgress::update(int64_t done) {
  const auto now = Clock::now();
  if (first_ < 0) {
    first_ = done - 1;
  }
  const std::chrono::duration<double> interval(is_terminal_ ? 0.5 : 10.0);
  if (now - last_ < interval) return;
  last_ = now;
  const double seconds = std::chrono::duration<double>(now - start_).count();
  const double left = seconds / static_cast<double>(done - first_) * static_cast<double>(total_ - done);
  fmt::print(stderr, "{}{} {} / {}  {} %  {} left{}", is_terminal_ ? "\r\x1b[K" : "", verb_, done, total_,
             100 * done / total_, duration_text(left), is_terminal_ ? "" : "\n");
  std::fflush(stderr);
  is_open_ = is_terminal_;
}

}  // namespace kiln
