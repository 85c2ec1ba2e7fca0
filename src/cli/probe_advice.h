// What a probe advises: a line for each thing that people tune, with what it would gain.
#pragma once
#include <nlohmann/json.hpp>

#include "plan/run/plan.h"

namespace kiln::cli {

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

}  // namespace kiln::cli
