// The measurements of a long run in few lines, while they are read: each is the mean of a run of lines of the
// log, and keeps the lowest and the highest of them.
#pragma once
#include <cstddef>
#include <utility>
#include <vector>

#include "core/json.h"

namespace kiln {

// What a thinned line has beside the means: objects with the extremes of some of its numbers, by their keys.
// A line that stands for itself has none.
inline constexpr const char *kLowest = "lowest", *kHighest = "highest";

class ThinnedLines {
 public:
  // Keeps between most / 2 and `most` lines, once there are so many. REQUIRES: `most` is even.
  explicit ThinnedLines(size_t most) : most_(most) {}

  void add(nlohmann::json line);
  // Oldest first. The last one may stand for fewer lines than the others.
  const std::vector<nlohmann::json>& lines() const& { return lines_; }
  std::vector<nlohmann::json> lines() && { return std::move(lines_); }

 private:
  size_t most_;
  int64_t stride_ = 1;   // lines of the log that a full line stands for
  int64_t in_last_ = 0;  // that the last one stands for
  std::vector<nlohmann::json> lines_;
};

}  // namespace kiln
