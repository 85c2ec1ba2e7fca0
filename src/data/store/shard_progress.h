// A progress line on stderr for work on a store. Torch-free.
#pragma once
#include <chrono>
#include <cstdint>
#include <string>

namespace kiln {

// Prints "verified 12 / 313  4 %  0:41 left" every half second on a terminal, every ten seconds elsewhere.
class ShardProgress {
 public:
  ShardProgress(std::string verb, int64_t total);
  ~ShardProgress();  // ends the line
  ShardProgress(const ShardProgress&) = delete;
  ShardProgress& operator=(const ShardProgress&) = delete;
  void update(int64_t done);

 private:
  using Clock = std::chrono::steady_clock;
  std::string verb_;
  int64_t total_, first_ = -1;
  bool is_terminal_, is_open_ = false;
  Clock::time_point start_, last_;
};

}  // namespace kiln
