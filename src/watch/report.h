// RUN/report.html: what a run did, in one self-contained file.
#pragma once
#include <string>

namespace kiln {

// Reads log.jsonl, evaluations.jsonl, samples/, config.json and config.toml of the run; writes `out`
// ("": RUN/report.html). Throws Error.
void write_report(const std::string& run, const std::string& out = "");

}  // namespace kiln
