#include "core/stop_signal.h"

#include <csignal>
#include <ctime>
#include <initializer_list>

namespace kiln {

namespace {

constexpr time_t kOnePress = 2;  // seconds: a terminal and a launcher both pass on the same Ctrl-C

volatile std::sig_atomic_t stop_requested = 0;
volatile time_t requested_at = 0;

void request_stop(int signal) {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  if (stop_requested == 0) {
    requested_at = now.tv_sec;
    stop_requested = 1;
  } else if (now.tv_sec >= requested_at + kOnePress) {
    std::signal(signal, SIG_DFL);
    raise(signal);
  }
}

}  // namespace

StopSignal::StopSignal() {
  stop_requested = 0;
  struct sigaction action {};
  action.sa_handler = request_stop;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  std::signal(SIGXFSZ, SIG_IGN);
}

StopSignal::~StopSignal() {
  for (int signal : {SIGINT, SIGTERM, SIGXFSZ}) std::signal(signal, SIG_DFL);
}

bool StopSignal::requested() const { return stop_requested != 0; }

}  // namespace kiln
