// A run that is read while it grows.
#pragma once
#include <cstdint>
#include <ctime>
#include <map>
#include <string>

#include "watch/reported_run.h"
#include "watch/thinned_lines.h"

namespace kiln {

class LiveRun {
 public:
  explicit LiveRun(std::string folder);

  // Reads what was added to the log since the last call, a megabyte at most, and what lies beside it
  // when that has changed. Returns whether anything has changed. What cannot be read is said by problem().
  bool update();
  bool has_more() const { return unread_ > 0; }  // of the log, when it was last read

  // Its log has the events, its steps are thinned, its grids have addresses below the page of the run.
  const ReportedRun& run() const { return run_; }
  // The files that the addresses of its grids stand for, by their names ("step-00001000.png").
  const std::map<std::string, std::string>& pictures() const { return pictures_; }
  const std::string& problem() const { return problem_; }
  std::string status() const;  // for people: how far the log was read and when it was written
  void rename(const std::string& name) { run_.name = name; }

 private:
  bool read_log();
  void take_line(const std::string& text);
  bool read_beside();

  ReportedRun run_;
  ThinnedLines steps_;
  std::string problem_;
  uint64_t log_file_ = 0;            // the inode: a resume may write the log anew
  int64_t offset_ = 0, unread_ = 0;  // bytes of the log
  std::time_t written_at_ = 0;       // of the log; 0: there is none
  std::string state_beside_;         // when the rest was read
  std::map<std::string, std::string> pictures_;
};

}  // namespace kiln
