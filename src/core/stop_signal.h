// SIGINT and SIGTERM as a request to finish the work in hand, save it and exit.
#pragma once

namespace kiln {

// While it lives, the first SIGINT or SIGTERM sets requested(); another one, two seconds later
// or more, ends the process at once. A file that grows beyond the process' limit then gives an error to
// report instead of a killing signal.
class StopSignal {
 public:
  StopSignal();
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  bool requested() const;
};

}  // namespace kiln
