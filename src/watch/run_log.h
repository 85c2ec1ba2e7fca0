// RUN/log.jsonl: one JSON object a line, {"step": ...} measurements and {"event": ...} happenings.
// Torch-free.
#pragma once
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace kiln {

class RunLog {
 public:
  // Opens for appending. Lines of steps beyond `from_step` (of a run that went on after its last checkpoint)
  // and a torn last line are cut first. Throws Error.
  RunLog(const std::string& run, int64_t from_step);

  // Appends a line and hands it to the system, so that a killed run loses none.
  void append(const nlohmann::json& line);

 private:
  struct Close {
    void operator()(FILE* file) const { std::fclose(file); }
  };
  std::string path_;
  std::unique_ptr<FILE, Close> file_;
};

// Every complete line of a run's log; empty if there is none.
std::vector<nlohmann::json> read_run_log(const std::string& run);

}  // namespace kiln
