#include "run/option_values.h"

#include <type_traits>

#include "core/error.h"
#include "core/json_config.h"
#include "core/text/json_text.h"
#include "core/text/nearest_name.h"
#include "models/registry.h"
#include "run/option_table.h"

namespace kiln {

namespace {

// Sets the field if the JSON has its type. Returns whether it has.
bool assign(const char*, bool& field, const nlohmann::json& value) {
  if (value.is_boolean()) value.get_to(field);
  return value.is_boolean();
}
bool assign(const char*, std::string& field, const nlohmann::json& value) {
  if (value.is_string()) value.get_to(field);
  return value.is_string();
}
bool assign(const char*, std::floating_point auto& field, const nlohmann::json& value) {
  if (value.is_number()) value.get_to(field);
  return value.is_number();
}
template <std::integral T>
bool assign(const char*, T& field, const nlohmann::json& value) {
  if (is_integer<T>(value)) value.get_to(field);
  return is_integer<T>(value);
}
// Returns the value in words if it is the true or false of a flag that takes names since.
template <class T>
nlohmann::json in_words(const nlohmann::json& value) {
  if constexpr (MeansAlone<T>)
    if (value.is_boolean()) return value.get<bool>() ? T::kAlone : "none";
  return value;
}
template <TextOption T>
bool assign(const char* name, T& field, const nlohmann::json& value) {
  const nlohmann::json text = in_words<T>(value);
  if (text.is_string()) parse_option(name, text.get<std::string>(), field);
  return text.is_string();
}
// A single value is a list of one; "none" is the empty list, as on the command line.
template <class T>
bool assign(const char* name, std::vector<T>& field, const nlohmann::json& value) {
  nlohmann::json items = value;
  if (value == "none")
    items = nlohmann::json::array();
  else if (!value.is_array())
    items = nlohmann::json::array({value});
  std::vector<T> list(items.size());
  for (size_t i = 0; i < items.size(); ++i)
    if (!assign(name, list[i], items[i])) return false;
  field = std::move(list);
  return true;
}

template <class T>
constexpr const char* type_name() {
  if constexpr (std::is_same_v<T, bool>)
    return "true or false";
  else if constexpr (std::is_same_v<T, std::string> || TextOption<T>)
    return "a string";
  else if constexpr (std::is_integral_v<T>)
    return "an integer";
  else if constexpr (std::is_floating_point_v<T>)
    return "a number";
  else if constexpr (std::is_same_v<T, std::vector<std::string>>)
    return "a list of strings";
  else
    return "a list of numbers";
}

template <class T>
nlohmann::json json_of(const T& field) {
  if constexpr (TextOption<T>)
    return option_text(field);
  else
    return field;
}

// Returns true for equal values. JSON in a string may be written in several ways.
bool are_same(const nlohmann::json& saved, const nlohmann::json& now) {
  if (saved == now || !saved.is_string() || !now.is_string()) return saved == now;
  const auto parsed = [](const nlohmann::json& value) {
    return json_or_discarded("train", value.get<std::string>(), "a recorded option");
  };
  return parsed(saved).is_object() && parsed(saved) == parsed(now);
}

}  // namespace

void set_option(TrainOptions& options, const std::string& name, const nlohmann::json& value) {
  bool known = false;
  std::vector<std::string> names;
  visit_options(options, [&](const char* option, auto& field, OnResume, const std::string&) {
    names.push_back(option);
    if (name != option) return;
    known = true;
    if (!assign(option, field, value))
      fail("train", "{} expects {}, got {}", name, type_name<std::remove_cvref_t<decltype(field)>>(),
           value.dump());
  });
  if (!known) fail("train", "unknown option '{}': did you mean '{}'?", name, nearest_name(name, names));
}

nlohmann::json to_json(const TrainOptions& options) {
  nlohmann::json json = nlohmann::json::object();
  visit_options(options, [&](const char* name, const auto& field, OnResume, const std::string&) {
    json[name] = json_of(field);
  });
  return json;
}

std::string toml_value(const nlohmann::json& value) {
  if (!value.is_array()) return value.dump();
  std::string list = "[";
  for (size_t i = 0; i < value.size(); ++i) list += (i ? ", " : "") + value[i].dump();
  return list + "]";
}

std::string to_toml(const TrainOptions& options) {
  std::string toml;
  const bool has_own_length = options.epochs > 0 || !options.stages.empty();
  visit_options(options, [&](const std::string& name, const auto& field, OnResume, const std::string&) {
    if (has_own_length && name == "max-steps") return;
    toml += fmt::format("{} = {}\n", name, toml_value(json_of(field)));
  });
  return toml;
}

int64_t own_image_size(const ModelOptions& model) {
  return own_image_size(model.name, read_json_option("train", "--model-config", model.config));
}

OptionChanges compare_options(const nlohmann::json& saved, const nlohmann::json& now) {
  OptionChanges changes;
  const TrainOptions defaults;
  visit_options(defaults, [&](const char* name, const auto& default_value, OnResume on_resume,
                              const std::string&) {
    if (on_resume == OnResume::kHarmless) return;
    using T = std::remove_cvref_t<decltype(default_value)>;
    const nlohmann::json before = saved.contains(name) ? in_words<T>(saved.at(name)) : json_of(default_value);
    if (are_same(before, now.at(name))) return;
    (on_resume == OnResume::kRefuse ? changes.refused : changes.warned)
        .push_back(fmt::format("--{} ({} -> {})", name, before.dump(), now.at(name).dump()));
  });
  return changes;
}

}  // namespace kiln
