#include "run/train_command.h"

#include "run/option_table.h"
#include "run/option_values.h"

namespace kiln {

namespace {

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

}  // namespace

std::string command_line(const TrainOptions& options) {
  const nlohmann::json defaults = to_json(TrainOptions{}), values = to_json(options);
  std::string line = "kiln train";
  TrainOptions table;
  visit_options(table, [&](const std::string& name, const auto&, OnResume, const std::string&) {
    const nlohmann::json& value = values.at(name);
    if (value == defaults.at(name)) return;
    if (value.is_boolean())
      line += (value.get<bool>() ? " --" : " --no-") + name;
    else
      line += " --" + name + " " + value_text(value);
  });
  return line;
}

}  // namespace kiln
