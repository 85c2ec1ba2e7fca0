// `kiln plan --search` over models and GPU types: which model for these GPUs, which GPUs for this model.
#pragma once
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "plan/run/plan.h"
#include "plan/search/search_axes.h"

namespace kiln {

struct ComparisonOptions {
  SearchOptions search;             // its plan's model and GPU are replaced
  std::vector<std::string> models;  // names
  std::vector<std::string> gpus;
  std::map<std::string, double> prices{};  // of a GPU hour, by the GPU's name; others: search.plan's
  std::set<std::string> given{};           // options of training that with_published_objective() leaves
};

// The options with the objective that the authors of their model trained it with. Options that are `given`
// stay, and with an objective all others.
TrainOptions with_published_objective(TrainOptions options, const std::set<std::string>& given);

// The names that --model or --gpu gives: separated by commas. The beginning of several models' names
// ("DiT", "DiT-XL") stands for all of them, "any" for every built-in GPU. Throws Error for unknown
// names.
std::vector<std::string> models_named(const std::string& text);
std::vector<std::string> gpus_named(const std::string& text);
// "A100-80G=1.9,RTX-4090=0.4". Throws Error.
std::map<std::string, double> read_prices(const std::string& text);

struct ComparedRun {
  Plan plan;  // the best of its model and GPU: of the numbers of GPUs that meet the limits the cheapest
  bool meets = true;  // the deadline and the cost
};

struct Comparison {
  ComparisonOptions options;
  size_t num_configurations = 0;
  // What meets the limits first; then the models that compute most per image, which is what their quality
  // goes by; of a model what costs least, without prices what takes least time.
  std::vector<ComparedRun> ranked{};
  std::vector<std::string> left_out{};  // what cannot be trained or does not fit, one line each, and why
};

// Every row equals the search of its model and its GPU alone. Throws Error for options with which nothing can
// be planned.
Comparison compare_runs(const ComparisonOptions& options);

std::string to_text(const Comparison& comparison);
nlohmann::json to_json(const Comparison& comparison);

}  // namespace kiln
