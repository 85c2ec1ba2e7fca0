// `kiln probe`: runs the planned command for a few hundred real steps and says what they mean for the whole
// run.
#pragma once
#include <string>

#include "core/json.h"
#include "parallel/ranks/process_group.h"
#include "run/train_options.h"
#include "train/loop.h"
#include "watch/step_bound.h"

namespace kiln {

struct ProbeOptions {
  TrainOptions train;
  int64_t steps = 500;
  bool audits_precision = false;  // of the first steady step (RunContext)
  std::string report{};           // file for the report of the steps; "": no report
  // Whether a checkpoint ends the run, so that this phase is measured too. Without it no disk is needed.
  bool checkpoint = true;
  nlohmann::json predicted = nullptr;  // the figures of a plan (watch/prediction.h)
  int64_t memory_bytes = 0;            // of the device; 0: not known
  double data_sheet_flops = 0;         // of the device (RunContext)
  std::vector<IdealSegment> ideal{};   // of this rank's step; empty: the result has no bound
  std::shared_ptr<ProcessGroup> group = std::make_shared<ProcessGroup>();  // of the run
};

// Trains in a temporary folder, which is removed afterwards; --out is not touched. Returns {"predicted",
// "measured", "findings", "warnings", "not_run": [phases], "extrapolated": {"steps", "days", "cost"}}, and
// after an audit also "precision" (watch/precision_audit.h), with an ideal step also "bound"
// (watch/step_bound.h). Throws Error as train() does, and for options that a probe cannot honour. Every rank
// calls it; ranks other than 0 get null.
nlohmann::json probe(const ProbeOptions& options);

// Returns the result as a table for the terminal, with its "advice" if it has some,
// [{"about": ..., "text": ...}], and what a GPU chose: {"attention": [engines],
// "epilogues": {product: {"served", "refused"}}}.
std::string probe_text(const nlohmann::json& result);

}  // namespace kiln
