// Progress lines on stderr. Torch-free.
#pragma once
#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

namespace kiln {

// A line that is written again and again: in its own place on a terminal, below the last one elsewhere.
class LiveLine {
 public:
  LiveLine();
  // True when it is time for the next text: every half second on a terminal, every ten seconds elsewhere.
  bool is_due();
  void show(const std::string& text);
  // End the line. What follows stands below it, or in its place.
  void end();
  void clear();
  double seconds() const;  // since it was made

 private:
  using Clock = std::chrono::steady_clock;
  bool is_terminal_, is_open_ = false;
  Clock::time_point start_ = Clock::now(), last_ = start_;
};

// The progress of a long loop over images or captions.
class ProgressLine {
 public:
  // `done` of `total` were finished before this process started. `unit`: what is counted.
  ProgressLine(int64_t done, int64_t total, bool is_shown = true, const char* unit = "images")
      : first_(static_cast<double>(done)), total_(total), is_shown_(is_shown), unit_(unit) {}
  // Prints now and then: "1234 / 3656 images  152 images/s  0m 16s left  2 skipped". `done` may include part
  // of an image.
  void update(double done, int64_t num_skipped = 0);
  // Prints once more and ends the line.
  void finish(int64_t done, int64_t num_skipped = 0);
  // Ends the line, so that a message can be printed.
  void clear() { line_.clear(); }

 private:
  void print(double done, int64_t num_skipped);

  double first_;
  int64_t total_;
  bool is_shown_;
  const char* unit_;
  LiveLine line_;
};

// The progress of work on a store.
class ShardProgress {
 public:
  ShardProgress(std::string verb, int64_t total) : verb_(std::move(verb)), total_(total) {}
  ~ShardProgress() { line_.end(); }
  ShardProgress(const ShardProgress&) = delete;
  // Prints now and then: "verified 12 / 313  4 %  0m 41s left".
  void update(int64_t done);

 private:
  std::string verb_;
  int64_t total_, first_ = -1;
  LiveLine line_;
};

}  // namespace kiln
