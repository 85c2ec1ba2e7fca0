// kiln probe --variants FILE: plans each variant, or probes it in a process of its own.
#pragma once
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "run/train_options.h"

namespace kiln::cli {

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
