// `kiln probe`: the planned command for a few hundred real steps, and what they say about the whole run.
#pragma once
#include <nlohmann/json.hpp>
#include <string>

#include "parallel/ranks/process_group.h"
#include "run/train_options.h"
#include "train/loop.h"

namespace kiln {

struct ProbeOptions {
  TrainOptions train;
  int64_t steps = 500;
  // Audits the precision of the first steady step (RunContext::audit_ops); null: it does not.
  MakeOpSource audit_ops = nullptr;
  std::string report{};    // a file for the report of the steps; "": none is kept
  bool checkpoint = true;  // at the end, so that this phase is measured too; off: no disk is needed
  nlohmann::json predicted = nullptr;  // the figures of a plan (watch/prediction.h)
  int64_t memory_bytes = 0;            // of the device; 0 = not known
  double data_sheet_flops = 0;         // of the device (RunContext)
  std::shared_ptr<ProcessGroup> group = std::make_shared<ProcessGroup>();  // of the run
};

// Trains in a temporary folder, which is removed; --out is not touched. Returns {"predicted", "measured",
// "findings", "warnings", "not_run": [phases], "extrapolated": {"steps", "days", "cost"}}, of an audit also
// "precision" (watch/precision_audit.h). Throws Error: as
// train(), and for options that a probe cannot honour. Every rank calls it; null on ranks other than 0.
nlohmann::json probe(const ProbeOptions& options);

// The result as a table for the terminal.
std::string probe_text(const nlohmann::json& result);

}  // namespace kiln
