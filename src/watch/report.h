// Self-contained HTML reports of one run and of several.
#pragma once
#include <string>
#include <vector>

namespace kiln {

// Reads log.jsonl, evaluations.jsonl, samples/, config.json and config.toml of the run; writes `out`
// ("": RUN/report.html). Throws Error.
void write_report(const std::string& run, const std::string& out = "");

// Writes a page with several runs side by side: curves, grids, speed, memory and metrics. Reads each run's
// log.jsonl, config.json, samples/ and evaluations.jsonl. Metrics with different protocols get separate
// tables, which say what differs. Throws Error: a folder without a log.
void write_runs_report(const std::vector<std::string>& runs, const std::string& out);

}  // namespace kiln
