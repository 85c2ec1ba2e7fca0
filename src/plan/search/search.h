// `kiln plan --search`: finds the few best of all configurations of a run, as commands.
#pragma once
#include <string>
#include <vector>

#include "core/json.h"
#include "plan/search/search_space.h"

namespace kiln {

struct SearchChoice {
  std::string goal;  // "fastest that fits", ...
  Plan plan;         // traced for this choice alone
};

struct SearchResult {
  SearchOptions options;
  MachineProfile machine;
  size_t num_configurations = 0;
  // The fastest, the cheapest and the one of least memory that fit and meet the deadline and the cost; one
  // choice if these are the same.
  std::vector<SearchChoice> best{};
  // With any_gpus: of each number of GPUs the fastest that fits and meets them.
  std::vector<SearchChoice> by_gpus{};
  std::string problem{};                // why there is none, in one line
  std::vector<SearchChoice> nearest{};  // what comes nearest if there is none; at most one
};

// Searches all configurations. Throws what check_search() throws.
SearchResult search(const SearchOptions& options);

// Throws Error for options that cannot be planned and limits without effect.
void check_search(const SearchOptions& options, const MachineProfile& machine);

nlohmann::json choice_json(const SearchChoice& choice);
nlohmann::json to_json(const SearchResult& result);
std::string to_text(const SearchResult& result);

// Returns "kiln train --model ...", ready to be pasted, under torchrun if several machines are needed. If the
// plan has no data and no run folder, they are called store (or pictures) and run.
std::string launch_command(const Plan& plan);

}  // namespace kiln
