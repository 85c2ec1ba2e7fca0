// Shares a processor with another program.
#pragma once
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <filesystem>

namespace kiln::test {

// False where the system does not say how long threads wait for a processor.
inline bool system_counts_waiting() { return std::filesystem::exists("/proc/self/schedstat"); }

// While this lives, the calling thread runs on one processor alone, and so does another program that never
// rests.
class BusyProcessor {
 public:
  BusyProcessor() {
    ::sched_getaffinity(0, sizeof before_, &before_);
    size_t first = 0;
    while (!CPU_ISSET(first, &before_)) ++first;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(first, &one);
    ::sched_setaffinity(0, sizeof one, &one);
    other_ = ::fork();
    if (other_ == 0) {
      ::alarm(60);  // should this process be killed
      for (volatile int64_t turns = 0;;) turns = turns + 1;
    }
  }
  ~BusyProcessor() {
    if (other_ > 0) {
      ::kill(other_, SIGKILL);
      ::waitpid(other_, nullptr, 0);
    }
    ::sched_setaffinity(0, sizeof before_, &before_);
  }
  BusyProcessor(const BusyProcessor&) = delete;

 private:
  cpu_set_t before_{};
  pid_t other_ = -1;
};

}  // namespace kiln::test
