// `kiln probe --variants`: several configurations of a run side by side, each with what it gains.
#pragma once
#include <set>
#include <string>
#include <vector>

#include "core/json.h"
#include "plan/run/plan.h"

namespace kiln {

struct Variant {
  std::string name, on;                // `on`: the variant that it changes; "" for the first of a chain
  std::vector<std::string> changes{};  // what it sets beyond `on`, or beyond what all share: "recompute all"
  TrainOptions options{};
};
// Reads a TOML file: options that all variants share, then a [name] for each with its own, and on = "NAME" if
// it starts from another one. `base`: options of the command line. Those named in `given` go before the file.
// Throws Error naming file and line if there are no variants, an unknown `on`, or a value that no option
// takes.
std::vector<Variant> read_variants(const std::string& path, const TrainOptions& base,
                                   const std::set<std::string>& given);

// A variant's row: seconds of a step, the memory of one device, or why there are none.
struct VariantResult {
  double step_s = 0, images_per_s = 0, encoding_share = 0;
  int64_t memory_bytes = 0;
  std::string problem{};             // "" if it runs
  nlohmann::json details = nullptr;  // figures of a plan, or of a probe
};
// Plans a variant on `plan`'s GPUs. Data that are not here are planned as if they were: pictures if there
// is an autoencoder, else features.
VariantResult plan_variant(const Variant& variant, PlanOptions plan);

// Returns {"source", "variants": [{"name", "on", "changes", "step_s", ..., "gain", "gain_in_all", ...}]}. A
// gain says how many times as fast a variant is as `on`, and in all as the first variant that runs.
nlohmann::json variants_json(const std::string& source, const std::vector<Variant>& variants,
                             const std::vector<VariantResult>& results);
std::string variants_text(const nlohmann::json& table);  // for the terminal

}  // namespace kiln
