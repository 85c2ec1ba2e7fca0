// The pages of one run and of several.
#pragma once
#include <string>
#include <vector>

namespace kiln {

class Page;
struct ReportedRun;

// Returns the page of a run, and one with several runs side by side (below). They read plan.json and
// precision.json of the folders. Throw Error.
Page report_page(const ReportedRun& run);
Page runs_page(const std::vector<ReportedRun>& runs);

// Reads log.jsonl, evaluations.jsonl, samples/ and the newest checkpoint of the run; writes `out`
// ("": RUN/report.html). Throws Error.
void write_report(const std::string& run, const std::string& out = "");

// Writes a page with several runs side by side: curves, grids, speed, memory, metrics, stages and the options
// that differ. Metrics with different protocols get separate tables, which say what differs. Throws Error.
void write_runs_report(const std::vector<std::string>& runs, const std::string& out);

}  // namespace kiln
