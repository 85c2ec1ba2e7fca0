// The progress line of a long loop over pictures.
#pragma once
#include <chrono>
#include <cstdint>

namespace kiln {

class ProgressLine {
 public:
  // `done` of `total` were there before this run. On a terminal the line is rewritten in place.
  ProgressLine(int64_t done, int64_t total, bool is_shown = true);
  // Prints now and then: "1,234 / 3,656 images  152.3 images/s  0:16 left  2 skipped".
  void update(int64_t done, int64_t num_skipped);
  // Prints once more and ends the line.
  void finish(int64_t done, int64_t num_skipped);
  // Ends the line, so that a message can be printed.
  void clear();

 private:
  void print(int64_t done, int64_t num_skipped);

  using Clock = std::chrono::steady_clock;
  int64_t first_, total_;
  bool is_shown_, is_terminal_, is_open_ = false;
  Clock::time_point start_, last_;
};

}  // namespace kiln
