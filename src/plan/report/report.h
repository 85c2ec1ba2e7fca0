// A plan as text, JSON and a page; the tables of docs/.
#pragma once
#include <nlohmann/json.hpp>
#include <string>

#include "plan/run/plan.h"

namespace kiln {

nlohmann::json to_json(const Plan& plan);  // {"predicted": {peak_bytes, by_kind, by_phase, step_s, ...}, ...}
std::string to_text(const Plan& plan);
std::string to_html(const Plan& plan);

// The tables of docs/planning.md and docs/scaling.md, in Markdown: made by the planner, so that they say what
// it says. "sizes": every published DiT at 256 and 512 pixels. "quoted": the figures that circulate, beside
// the plan's. "scaling": ranks and ZeRO stages. Throws Error naming the tables there are.
std::string markdown_table(const std::string& name);

}  // namespace kiln
