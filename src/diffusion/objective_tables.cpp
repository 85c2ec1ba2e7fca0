#include "diffusion/objective_types.h"

#include <fmt/ranges.h>

#include "core/error.h"
#include "core/json_config.h"

namespace kiln {

std::unique_ptr<Objective> make_objective(const nlohmann::json& config) {
  const JsonConfig reader("objective", config);
  const auto name = [](const std::string& type, const std::string& loss) {
    return loss.empty() ? type : type + " with loss " + loss;
  };
  const std::string asked = name(reader.get<std::string>("type", ""), reader.get<std::string>("loss", ""));
  std::vector<std::string> known;
  for (const ObjectiveType& entry : kObjectiveTypes) {
    known.push_back(name(entry.type, entry.loss));
    if (asked == known.back()) return entry.make(config);
  }
  fail("objective", "expected the objective to be one of {}, got \"{}\"", fmt::join(known, ", "), asked);
}

nlohmann::json objective_config(const std::string& name) {
  for (const NamedObjective& entry : kNamedObjectives)
    if (name == entry.name) return nlohmann::json::parse(entry.config);
  fail("objective", "expected --objective to be one of {}, got \"{}\"", fmt::join(objective_names(), ", "),
       name);
}

std::vector<std::string> objective_names() {
  std::vector<std::string> names;
  for (const NamedObjective& entry : kNamedObjectives) names.push_back(entry.name);
  return names;
}

}  // namespace kiln
