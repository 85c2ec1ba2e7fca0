#include "core/stop_signal.h"

#include <array>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <initializer_list>

namespace kiln {

namespace {

constexpr int64_t kOnePressMs = 2000;  // a terminal and a launcher may both pass on the same Ctrl-C

volatile std::sig_atomic_t stop_requested = 0;
volatile int64_t requested_at_ms = 0;  // 0: no signal has come

void request_stop(int signal) {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  const int64_t now_ms = int64_t{now.tv_sec} * 1000 + now.tv_nsec / 1'000'000;
  if (requested_at_ms == 0) {
    requested_at_ms = now_ms;
    stop_requested = 1;
  } else if (now_ms >= requested_at_ms + kOnePressMs) {
    std::signal(signal, SIG_DFL);
    raise(signal);
  }
}

// A kernel of oneDNN's matrix product points the stack register at its own memory on the heap. A handler that
// ran where that register points would write its frame over what lies below: weights, or another's data.
void handle_signals_elsewhere() {
  constexpr size_t kStackBytes = 1 << 16;  // the registers of AVX-512 and AMX take 11 KB of it
  alignas(64) static std::array<std::byte, kStackBytes> stack;
  stack_t present{};
  if (sigaltstack(nullptr, &present) != 0 || (present.ss_flags & SS_DISABLE) == 0) return;  // it has a stack
  const stack_t own{.ss_sp = stack.data(), .ss_flags = 0, .ss_size = stack.size()};
  sigaltstack(&own, nullptr);
}

}  // namespace

StopSignal::StopSignal() {
  stop_requested = 0;
  requested_at_ms = 0;
  handle_signals_elsewhere();
  struct sigaction action {};
  action.sa_handler = request_stop;
  action.sa_flags = SA_RESTART | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  std::signal(SIGXFSZ, SIG_IGN);
}

StopSignal::~StopSignal() {
  std::signal(SIGXFSZ, SIG_DFL);
  // After a stop request the handlers stay. The process is about to end with its work saved, and a second
  // delivery of the same Ctrl-C must not turn that into a failure.
  if (stop_requested != 0) return;
  for (int signal : {SIGINT, SIGTERM}) std::signal(signal, SIG_DFL);
}

bool StopSignal::requested() const { return stop_requested != 0; }
void StopSignal::request() const { stop_requested = 1; }

}  // namespace kiln
