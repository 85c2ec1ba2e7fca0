// SIGINT and SIGTERM as a request to finish the work in hand, save it and exit.
#pragma once

namespace kiln {

// While it lives, the first SIGINT or SIGTERM sets requested(). Another one at least two seconds later ends
// the process at once. Writing a file beyond the process's size limit then gives an error to report instead
// of a fatal signal. The main thread makes it, since the system prefers that one for a signal and only it
// has a stack for the handler.
class StopSignal {
 public:
  StopSignal();
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  bool requested() const;
  // Sets requested() as the first signal does. A signal that comes after it still counts as the first.
  void request() const;
};

}  // namespace kiln
