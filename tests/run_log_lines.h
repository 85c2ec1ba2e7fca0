// A run's log as a whole, for tests of short runs.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "watch/run_log.h"

namespace kiln::test {

inline std::vector<nlohmann::json> run_log_lines(const std::string& run) {
  std::vector<nlohmann::json> lines;
  read_run_log(run, [&](nlohmann::json line) { lines.push_back(std::move(line)); });
  return lines;
}

}  // namespace kiln::test
