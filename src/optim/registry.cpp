#include <fmt/ranges.h>
#include <algorithm>

#include "core/aten.h"
#include "core/error.h"
#include "core/json_config.h"
#include "optim/adamw.h"
#include "optim/adamw_8bit.h"
#include "optim/came.h"
#include "optim/optimizer.h"

namespace kiln {

namespace {

struct OptimizerType {
  const char* name;
  std::vector<std::string> keys;  // that the config may hold beside "type"
  std::unique_ptr<Optimizer> (*make)(const nlohmann::json&);
  nlohmann::json (*config_of)(const OptimizerOptions&);  // all but "type"
};

// Refuses an option that the optimizer would ignore.
void require_default(const OptimizerOptions& o, const char* option, bool is_default) {
  if (!is_default) fail("optimizer", "--{} has no effect on --optimizer {}: leave it out", option, o.name);
}

nlohmann::json adamw_config(const OptimizerOptions& o) {
  const OptimizerOptions defaults;
  require_default(o, "beta3", o.beta3 == defaults.beta3);
  require_default(o, "came-eps", o.came_eps == defaults.came_eps);
  require_default(o, "clip-threshold", o.clip_threshold == defaults.clip_threshold);
  return {{"betas", {o.beta1, o.beta2}}, {"eps", o.eps}, {"weight_decay", o.weight_decay}};
}

nlohmann::json came_config(const OptimizerOptions& o) {
  require_default(o, "adam-eps", o.eps == OptimizerOptions().eps);
  return {{"betas", {o.beta1, o.beta2, o.beta3}},
          {"eps", o.came_eps},
          {"clip_threshold", o.clip_threshold},
          {"weight_decay", o.weight_decay}};
}

const std::vector<OptimizerType>& entries() {
  static const std::vector<OptimizerType> kTypes = {
      {"adamw",
       {"betas", "eps", "weight_decay"},
       [](const nlohmann::json& config) -> std::unique_ptr<Optimizer> {
         return std::make_unique<AdamW>(parse_adamw(config));
       },
       adamw_config},
      {"adamw-8bit",
       {"betas", "eps", "weight_decay"},
       [](const nlohmann::json& config) -> std::unique_ptr<Optimizer> {
         return std::make_unique<AdamW8bit>(parse_adamw(config));
       },
       adamw_config},
      {"came",
       {"betas", "eps", "clip_threshold", "weight_decay", "variant"},
       [](const nlohmann::json& config) -> std::unique_ptr<Optimizer> {
         return std::make_unique<Came>(parse_came(config, CameVariant::kCamePytorch));
       },
       came_config},
      {"came-sana",
       {"betas", "eps", "clip_threshold", "weight_decay"},
       [](const nlohmann::json& config) -> std::unique_ptr<Optimizer> {
         return std::make_unique<Came>(parse_came(config, CameVariant::kSana));
       },
       came_config},
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
  nlohmann::json config = nlohmann::json::object();
  for (const OptimizerType& entry : entries())
    if (options.name == entry.name) config = entry.config_of(options);
  config["type"] = options.name;
  make_optimizer(config);
  return config;
}

int64_t state_bytes(const Optimizer& optimizer, const std::vector<FlatLayout>& layouts) {
  int64_t bytes = 0;
  for (const FlatLayout& layout : layouts) {
    FlatLayout own{.slots = {}, .size = 0, .alignment = optimizer.alignment()};
    for (const FlatSlot& slot : layout.slots) own.add(slot.key, slot.shape);
    if (own.size == 0) continue;
    for (const StateBuffer& buffer : optimizer.state(own))
      bytes += static_cast<int64_t>(dtype_size(buffer.dtype)) * state_values(buffer, own, own.size, own.size);
  }
  return bytes;
}

}  // namespace kiln
