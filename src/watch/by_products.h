// What a run writes beside its checkpoints. Torch-free.
#pragma once
#include <functional>
#include <set>
#include <string>

namespace kiln {

// Training does not end because a report or a plot cannot be written.
class ByProducts {
 public:
  // Calls write() and returns true. If it throws, prints the cause as a warning, the first time for this
  // `name` ("report.html"), and returns false.
  bool try_to_write(const std::string& name, const std::function<void()>& write);

 private:
  std::set<std::string> missed_;
};

}  // namespace kiln
