// The parts of kiln probe: what it advises, and the variants that it compares.
#pragma once
#include <set>
#include <string>

#include "core/json.h"
#include "plan/run/plan.h"
#include "run/train_options.h"

namespace kiln::cli {

// What a probe advises: a line for each thing that people tune, with what it would gain.
struct ProbedRun {
  TrainOptions options;    // as they were probed
  int64_t world_size = 1;  // ranks
  int64_t cpu_share = 1;   // processors of each
  SettingText change = option_on_command_line;
};

// Returns [{"about": "loader" | "precision" | "threads" | "recomputation" | "checkpoint", "text": what to
// change or why nothing, "gain": how many times as fast that is}]. The gain is measured by the probe, or
// planned with the profile of this machine (the text says which), and absent where neither knows it.
// `result`: probe()'s.
nlohmann::json probe_advice(const nlohmann::json& result, const ProbedRun& run);

// kiln probe --variants FILE: plans each variant, or probes it in a process of its own.
struct VariantsCommand {
  std::string file;
  std::string gpu;  // GPU to plan for; "": run here
  int64_t steps = 0;
  bool checkpoint = true;
};
// Returns the table (plan/report/variants.h). `given` are the names of the options on the command line.
// Throws Error.
nlohmann::json compare_variants(const VariantsCommand& command, const TrainOptions& base,
                                const std::set<std::string>& given);

}  // namespace kiln::cli
