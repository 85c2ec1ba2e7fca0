// kiln probe --variants FILE: each variant planned, or probed by a process of its own.
#pragma once
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "run/train_options.h"

namespace kiln::cli {

struct VariantsCommand {
  std::string file;
  std::string gpu;  // plan for it; "": run here
  int64_t steps = 0;
  bool checkpoint = true;
};
// The table (plan/report/variants.h). `given`: the names of the options of the command line. Throws Error.
nlohmann::json compare_variants(const VariantsCommand& command, const TrainOptions& base,
                                const std::set<std::string>& given);

}  // namespace kiln::cli
