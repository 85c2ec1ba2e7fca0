// How threads that work together wait for each other: spinning for about the time that a sleeping thread
// takes to wake, then asleep, so that another program has the processor. Torch-free.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>

namespace kiln {

using WaitWord = std::atomic<uint32_t>;
static_assert(sizeof(WaitWord) == sizeof(uint32_t) && WaitWord::is_always_lock_free);

// Sleeps while the word has this value. std::atomic's wait() would yield first, which hands over a whole turn
// to another program.
inline void sleep_while(WaitWord& word, uint32_t value) {
  ::syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
inline void wake_sleepers(WaitWord& word, int threads) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, threads, nullptr, nullptr, 0);
}

// Spins until is_done(). Returns false if it is not after a while.
template <class Condition>
bool spin_until(const Condition& is_done) {
  constexpr auto kLongest = std::chrono::microseconds(50);
  const auto end = std::chrono::steady_clock::now() + kLongest;
  do {
    for (int turn = 0; turn < 32; ++turn) {
      if (is_done()) return true;
#ifdef __x86_64__
      __builtin_ia32_pause();
#endif
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

}  // namespace kiln
