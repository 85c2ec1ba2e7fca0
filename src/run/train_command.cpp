#include "run/option_values.h"

#include <set>

#include "core/json.h"
#include "run/option_table.h"
#include "run/published_settings.h"

namespace kiln {

namespace {

// What other options take their defaults from, each after those that it depends on itself.
constexpr const char* kDeciding[] = {"model",          "model-config", "sample-every",
                                     "evaluate-every", "objective",    "sampler"};

std::string quoted(const std::string& text) {
  constexpr std::string_view kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./,:=+@%";
  if (!text.empty() && text.find_first_not_of(kPlain) == std::string::npos) return text;
  std::string result = "'";
  for (char c : text) result += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return result + "'";
}

std::string value_text(const nlohmann::json& value) {
  if (value.is_string()) return quoted(value.get<std::string>());
  if (!value.is_array()) return value.dump();
  if (value.empty()) return "none";
  std::string list;
  for (size_t i = 0; i < value.size(); ++i) list += (i ? "," : "") + value[i].dump();
  return list;
}

// Returns what a command that gives only these options becomes.
TrainOptions taken(TrainOptions options, const std::set<std::string>& given) {
  options.data.image_size = own_image_size(options.model);
  take_published_settings(options, given);
  return options;
}

}  // namespace

std::string command_line(const TrainOptions& options) {
  const nlohmann::json values = to_json(options);
  TrainOptions deciding;
  std::set<std::string> given;
  for (const char* name : kDeciding) {
    if (to_json(taken(deciding, given)).at(name) == values.at(name)) continue;
    set_option(deciding, name, values.at(name));
    given.insert(name);
  }
  const nlohmann::json defaults = to_json(taken(deciding, given));
  std::string line = "kiln train";
  TrainOptions table;
  visit_options(table, [&](const std::string& name, const auto&, OnResume, const std::string&) {
    const nlohmann::json& value = values.at(name);
    if (value == defaults.at(name) && !given.contains(name)) return;
    if (value.is_boolean())
      line += (value.get<bool>() ? " --" : " --no-") + name;
    else
      line += " --" + name + " " + value_text(value);
  });
  return line;
}

}  // namespace kiln
