// What a run writes beside its checkpoints. RUN/log.jsonl has one JSON object per line: {"step": ...} for
// measurements and {"event": ...} for events. Torch-free.
#pragma once
#include <functional>
#include <set>
#include <string>

#include "core/json.h"

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

class RunLog {
 public:
  // Opens the log for appending. First cuts a torn last line and the lines of steps beyond `from_step`, which
  // a run wrote after its last checkpoint. Throws Error.
  RunLog(const std::string& run, int64_t from_step);
  ~RunLog();
  RunLog(const RunLog&) = delete;
  RunLog& operator=(const RunLog&) = delete;

  // Appends a line and hands it to the system at once, so a killed run loses none. Throws Error, for example
  // on a full disk; then nothing of the line is there.
  void append(const nlohmann::json& line);

 private:
  void cut_beyond(int64_t step);

  std::string path_;
  int fd_ = -1;
};

// Hands over every complete line of a run's log, one after another. Without a log there is none.
void read_run_log(const std::string& run, const std::function<void(nlohmann::json line)>& take);

}  // namespace kiln
