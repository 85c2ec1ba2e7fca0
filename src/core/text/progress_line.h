// The progress line of a long loop over images or captions.
#pragma once
#include <chrono>
#include <cstdint>

namespace kiln {

class ProgressLine {
 public:
  // `done` of `total` were finished before this process started. On a terminal the line is rewritten in
  // place. `unit`: what is counted.
  ProgressLine(int64_t done, int64_t total, bool is_shown = true, const char* unit = "images");
  // Prints now and then: "1234 / 3656 images  152 images/s  0m 16s left  2 skipped". `done` may include part
  // of an image.
  void update(double done, int64_t num_skipped = 0);
  // Prints once more and ends the line.
  void finish(int64_t done, int64_t num_skipped = 0);
  // Ends the line, so that a message can be printed.
  void clear();

 private:
  void print(double done, int64_t num_skipped);

  using Clock = std::chrono::steady_clock;
  double first_;
  int64_t total_;
  bool is_shown_, is_terminal_, is_open_ = false;
  const char* unit_;
  Clock::time_point start_, last_;
};

}  // namespace kiln
