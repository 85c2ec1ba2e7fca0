#include "core/stop_signal.h"

#include <csignal>
#include <initializer_list>

namespace kiln {

namespace {

volatile std::sig_atomic_t stop_requested = 0;

void request_stop(int) { stop_requested = 1; }

}  // namespace

StopSignal::StopSignal() {
  stop_requested = 0;
  struct sigaction action {};
  action.sa_handler = request_stop;
  action.sa_flags = static_cast<int>(SA_RESTART | SA_RESETHAND);
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
