// Several runs on one page: curves, grids, speed, memory and metrics side by side.
#pragma once
#include <string>
#include <vector>

namespace kiln {

// Reads each run's log.jsonl, config.json, samples/ and evaluations.jsonl; writes `out`. Metrics whose
// protocols differ stand in tables of their own, with what differs. Throws Error: a folder without a log.
void write_runs_report(const std::vector<std::string>& runs, const std::string& out);

}  // namespace kiln
