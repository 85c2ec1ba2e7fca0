// A plan as text, JSON and a page; the tables of docs/.
#pragma once
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "plan/run/stage_plans.h"

namespace kiln {

nlohmann::json to_json(const Plan& plan);  // {"predicted": {peak_bytes, by_kind, by_phase, step_s, ...}, ...}
std::string to_text(const Plan& plan);
std::string to_html(const Plan& plan);
// Reports a run of several stages: a line of each, their sum, and the one that needs the most memory in full.
nlohmann::json to_json(const StagePlans& stages);
std::string to_text(const StagePlans& stages);

// What a table is of.
struct TableOptions {
  PlanOptions plan;
  std::set<std::string> given{};  // options of it that are: else an A100-80G, bf16

  bool has(const std::string& option) const { return given.contains(option); }
};

// The tables of docs/planning.md and docs/scaling.md, in Markdown: made by the planner, so that they say what
// it says, for the GPU, batch, dtype and steps that are given. "sizes": every published DiT at 256 and 512
// pixels. "gpus": one run on 1 to 8 GPUs and more. "options": what a run's options save, beside a published
// table. "results": published FIDs, beside the plan of their runs. "quoted": the figures that circulate,
// beside the plan's. "scaling": ranks and ZeRO stages. Throws Error naming the tables there are.
std::string markdown_table(const std::string& name, const TableOptions& options = {});

}  // namespace kiln
