// `kiln plan --search` over models and GPU types: which model for these GPUs, which GPUs for this model.
#pragma once
#include <map>
#include <set>
#include <string>
#include <vector>

#include "core/json.h"
#include "plan/run/plan.h"
#include "plan/search/search_space.h"

namespace kiln {

struct ComparisonOptions {
  SearchOptions search;             // its plan's model and GPU are replaced
  std::vector<std::string> models;  // names
  std::vector<std::string> gpus;
  std::map<std::string, double> prices{};  // of a GPU hour, by the GPU's name; others have search.plan's
  std::set<std::string> given{};           // options of training that as_published() leaves alone
};

// Returns the options with the size of pictures, the objective and the drawing of pictures that the authors
// of their model have (run/published_settings.h). Options that are `given` stay, as does the size of a
// store's pictures.
TrainOptions as_published(TrainOptions options, const std::set<std::string>& given);

// Return the names in --model and --gpu, which are separated by commas. The beginning of several models'
// names ("DiT", "DiT-XL") stands for all of them, "any" for every built-in GPU. Throw Error for unknown
// names.
std::vector<std::string> models_named(const std::string& text);
std::vector<std::string> gpus_named(const std::string& text);
// Reads "A100-80G=1.9,RTX-4090=0.4". Throws Error if the text is not like that.
std::map<std::string, double> read_prices(const std::string& text);

struct ComparedRun {
  // The best of its model and GPU. Of several numbers of GPUs that meet the limits, the cheapest.
  Plan plan;
  bool meets = true;  // the deadline and the cost
};

struct Comparison {
  ComparisonOptions options;
  size_t num_configurations = 0;
  // What meets the limits comes first. Then come the models that compute most per image, as quality goes by
  // that. Of a model, what costs least comes first, or without prices what takes least time.
  std::vector<ComparedRun> ranked{};
  std::vector<std::string> left_out{};  // what cannot be trained or does not fit, one line each, and why
};

// Searches every model on every GPU. Each row equals the search of its model and its GPU alone. Throws Error
// for options with which nothing can be planned.
Comparison compare_runs(const ComparisonOptions& options);

std::string to_text(const Comparison& comparison);
nlohmann::json to_json(const Comparison& comparison);

}  // namespace kiln
