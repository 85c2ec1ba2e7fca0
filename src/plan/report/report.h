// A plan as text, JSON and a page, and the tables of docs/.
#pragma once
#include <set>
#include <string>

#include "core/json.h"
#include "plan/run/make_plan.h"

namespace kiln {

nlohmann::json to_json(const Plan& plan);  // {"predicted": {peak_bytes, by_kind, by_phase, step_s, ...}, ...}
std::string to_text(const Plan& plan);
std::string to_html(const Plan& plan);
// These report a run of several stages: a line for each, their sum, and in full the one that needs the most
// memory.
nlohmann::json to_json(const StagePlans& stages);
std::string to_text(const StagePlans& stages);

// Whether text and page show other numbers of GPUs: a run of less than an hour needs no more of them. JSON
// always has them, for scripts.
inline bool shows_scaling(const Plan& plan) { return plan.scaling.size() > 1 && plan.days * 24 >= 1; }

// Options of a table.
struct TableOptions {
  PlanOptions plan;
  std::set<std::string> given{};  // the options that `plan` was given; else an A100-80G, bf16

  bool has(const std::string& option) const { return given.contains(option); }
};

// Returns a table of docs/plan_tables.md or docs/scaling.md in Markdown. The planner makes it, so that it
// says what the planner says, for the GPU, batch, dtype and steps that are given. "sizes": every published
// DiT at 256 and 512 pixels. "gpus": one run on 1 to 8 GPUs and more. "options": what a run's options save,
// beside a published table. "results": published FIDs, beside the plan of their runs. "quoted": the figures
// that circulate, beside the plan's. "scaling": ranks and ZeRO stages. Throws Error naming the tables there
// are.
std::string markdown_table(const std::string& name, const TableOptions& options = {});

// Returns its table "gpu-step": what one step takes on a GPU by kinds of operations, as it is and with
// --untried-gpu, and its sum with each of these ways; if nothing else is given, of DiT-XL/2 with 32 images on
// an H200. Throws Error: no GPU.
std::string gpu_step_table(const TableOptions& table);

// The second table of "sizes": every published model with captions, and SDXL, which guides compare them with.
std::string text_models_table();

}  // namespace kiln
