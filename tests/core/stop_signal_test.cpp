// Ctrl-C: the first asks for an end, one that comes with it is the same press.
#include "core/stop_signal.h"

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstddef>
#include <thread>
#include <vector>

namespace kiln {
namespace {

using std::chrono::milliseconds;

// Waits until late in a second of the clock that the presses are timed with.
void wait_for_the_end_of_a_second() {
  const auto in_second = [] {
    return std::chrono::steady_clock::now().time_since_epoch() % std::chrono::seconds(1);
  };
  while (in_second() < milliseconds(850)) std::this_thread::sleep_for(milliseconds(5));
}

TEST(StopSignal, ASecondPressWithinTwoSecondsDoesNotKill) {
  const StopSignal stop;
  EXPECT_FALSE(stop.requested());
  wait_for_the_end_of_a_second();
  std::raise(SIGINT);
  EXPECT_TRUE(stop.requested());
  std::this_thread::sleep_for(milliseconds(1300));  // two seconds of the clock's seconds have begun
  std::raise(SIGINT);
  EXPECT_TRUE(stop.requested());
}

TEST(StopSignal, ASecondPressWhileTheProcessEndsDoesNotKill) {
  {
    const StopSignal stop;
    std::raise(SIGINT);
  }
  std::raise(SIGINT);
  const StopSignal next;
  EXPECT_FALSE(next.requested());
}

TEST(StopSignal, ARequestIsNoPress) {
  const StopSignal stop;
  stop.request();
  EXPECT_TRUE(stop.requested());
  std::this_thread::sleep_for(milliseconds(2050));
  std::raise(SIGINT);  // the first one
  EXPECT_TRUE(stop.requested());
}

TEST(StopSignalDeathTest, ALaterPressEndsAtOnce) {
  EXPECT_EXIT(
      {
        const StopSignal stop;
        std::raise(SIGINT);
        std::this_thread::sleep_for(milliseconds(2050));
        std::raise(SIGINT);
      },
      ::testing::KilledBySignal(SIGINT), "");
}

#ifdef __x86_64__
// As a kernel that uses the stack register for its own memory would get it.
TEST(StopSignal, WritesNothingWhereTheStackRegisterPoints) {
  const StopSignal stop;
  const std::vector<std::byte> untouched(1 << 16, std::byte{7});
  std::vector<std::byte> heap = untouched;
  long result = SYS_tgkill;
  asm volatile(
      "mov %%rsp, %%r12\n\t"
      "mov %[top], %%rsp\n\t"
      "syscall\n\t"
      "mov %%r12, %%rsp"
      : "+a"(result)
      : "D"(getpid()), "S"(gettid()), "d"(SIGTERM), [top] "r"(heap.data() + heap.size())
      : "rcx", "r11", "r12", "memory");
  EXPECT_EQ(result, 0);
  // The thread sanitizer calls a handler later, from the next function that it knows.
  for (int i = 0; i < 1000 && !stop.requested(); ++i) std::this_thread::sleep_for(milliseconds(1));
  EXPECT_TRUE(stop.requested());
  EXPECT_TRUE(heap == untouched);
}
#endif

}  // namespace
}  // namespace kiln
