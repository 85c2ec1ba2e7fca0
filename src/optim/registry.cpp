#include <fmt/ranges.h>
#include <algorithm>

#include "core/error.h"
#include "core/json_config.h"
#include "optim/adamw.h"
#include "optim/optimizer.h"

namespace kiln {

namespace {

struct OptimizerType {
  const char* name;
  std::vector<std::string> keys;  // that the config may hold beside "type"
  std::unique_ptr<Optimizer> (*make)(const nlohmann::json&);
};

const std::vector<OptimizerType>& entries() {
  static const std::vector<OptimizerType> kTypes = {
      {"adamw",
       {"betas", "eps", "weight_decay"},
       [](const nlohmann::json& config) -> std::unique_ptr<Optimizer> {
         return std::make_unique<AdamW>(parse_adamw(config));
       }},
  };
  return kTypes;
}

}  // namespace

std::vector<std::string> optimizer_names() {
  std::vector<std::string> names;
  for (const OptimizerType& entry : entries()) names.push_back(entry.name);
  return names;
}

std::unique_ptr<Optimizer> make_optimizer(const nlohmann::json& config) {
  const auto type = JsonConfig("optimizer", config).get<std::string>("type", "");
  for (const OptimizerType& entry : entries()) {
    if (type != entry.name) continue;
    for (const auto& [key, value] : config.items())
      if (key != "type" && std::ranges::find(entry.keys, key) == entry.keys.end())
        fail("optimizer", "{} knows {}, got '{}'", type, fmt::join(entry.keys, ", "), key);
    return entry.make(config);
  }
  fail("optimizer", "type expects one of {}, got '{}'", fmt::join(optimizer_names(), ", "), type);
}

nlohmann::json optimizer_config_of(const OptimizerOptions& options) {
  const nlohmann::json config = {{"type", options.name},
                                 {"betas", {options.beta1, options.beta2}},
                                 {"eps", options.eps},
                                 {"weight_decay", options.weight_decay}};
  make_optimizer(config);
  return config;
}

}  // namespace kiln
