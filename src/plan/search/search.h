// `kiln plan --search`: of all configurations of a run the few that are best, as commands.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "plan/search/search_space.h"

namespace kiln {

struct SearchChoice {
  std::string goal;  // "fastest that fits", ...
  Plan plan;         // its own, traced for it alone
};

struct SearchResult {
  SearchOptions options;
  MachineProfile machine;
  size_t num_configurations = 0;
  // The fastest, the cheapest and the one of least memory that fit and meet the deadline and the cost; one
  // choice where these are the same.
  std::vector<SearchChoice> best{};
  std::vector<SearchChoice>
      by_gpus{};          // with any_gpus: the fastest of each number of GPUs that fits and meets
  std::string problem{};  // one line: why there is none
  std::vector<SearchChoice> nearest{};  // then: what comes nearest, at most one
};

// Throws Error for options that cannot be planned and limits without effect.
SearchResult search(const SearchOptions& options);

// Throws Error for options that cannot be planned and limits without effect.
void check_search(const SearchOptions& options, const MachineProfile& machine);

nlohmann::json choice_json(const SearchChoice& choice);
nlohmann::json to_json(const SearchResult& result);
std::string to_text(const SearchResult& result);

// "kiln train --model ...", ready to be pasted: under torchrun where several machines are needed. Where the
// plan has no data and no run folder, they are called store and run.
std::string launch_command(const Plan& plan);

}  // namespace kiln
