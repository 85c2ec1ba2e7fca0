#include "core/json_config.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <concepts>
#include <filesystem>
#include <limits>

#include "core/error.h"
#include "core/files/text_file.h"
#include "core/text/json_text.h"
#include "core/text/nearest_name.h"
#include "core/text/some_of.h"

namespace kiln {
namespace {

using nlohmann::json;

constexpr double kMostExact = 9007199254740992;  // 2^53: whole numbers up to here are exact in a double

bool is_integer(const json& value) {
  if (value.is_number_unsigned())
    return value.get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  if (!value.is_number_float()) return value.is_number_integer();
  const double number = value.get<double>();
  return number >= -kMostExact && number <= kMostExact &&
         number == static_cast<double>(static_cast<int64_t>(number));
}

template <class T>
struct JsonKind;
template <>
struct JsonKind<bool> {
  static constexpr const char* kName = "true or false";
  static bool fits(const json& value) { return value.is_boolean(); }
};
template <>
struct JsonKind<int64_t> {
  static constexpr const char* kName = "an integer";
  static bool fits(const json& value) { return is_integer(value); }
};
template <>
struct JsonKind<double> {
  static constexpr const char* kName = "a number";
  static bool fits(const json& value) { return value.is_number(); }
};
template <>
struct JsonKind<std::string> {
  static constexpr const char* kName = "a string";
  static bool fits(const json& value) { return value.is_string(); }
};
template <class T>
struct JsonKind<std::vector<T>> {
  static constexpr const char* kName = std::same_as<T, int64_t>  ? "a list of integers"
                                       : std::same_as<T, double> ? "a list of numbers"
                                                                 : "a list of strings";
  static bool fits(const json& value) {
    return value.is_array() && std::all_of(value.begin(), value.end(), JsonKind<T>::fits);
  }
};

// True if `name` is likely a mistyped known name.
bool is_near_one_of(const std::string& name, const std::set<std::string>& known) {
  return std::any_of(known.begin(), known.end(),
                     [&](const std::string& other) { return num_edits(name, other) <= name.size() / 3; });
}

}  // namespace

std::string read_text_option(std::string_view who, std::string_view option, const std::string& value) {
  std::error_code error;  // set for text that is too long for a path, too
  const auto type = std::filesystem::status(value, error).type();
  if (error == std::errc::permission_denied)
    fail(who, "{}: cannot read {}: {}", option, value, error.message());
  if (error || type == std::filesystem::file_type::not_found || type == std::filesystem::file_type::directory)
    return value;
  std::string text = read_text_file(fmt::format("{} {}", who, option), value);
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

json read_json_option(std::string_view who, std::string_view option, const std::string& value) {
  if (value.empty()) return json::object();
  const std::string text = read_text_option(who, option, value);
  json parsed = json_or_discarded(who, text, fmt::format("{}", option));
  if (!parsed.is_object())
    fail(who, "{} expects a JSON object or a file of one, got '{}'", option, brief(value));
  return parsed;
}

JsonConfig::JsonConfig(std::string_view who, const json& config) : who_(who), config_(config) {
  if (!config.is_object()) fail(who_, "expected a JSON object, got {}", brief(config));
}

bool JsonConfig::has(const std::string& key) const {
  read_.insert(key);
  const auto found = config_.find(key);
  return found != config_.end() && !found->is_null();
}

template <class T>
T JsonConfig::get(const std::string& key, T default_value) const {
  return has(key) ? require<T>(key) : default_value;
}

template <class T>
T JsonConfig::require(const std::string& key) const {
  if (!has(key)) fail(who_, "expected {} to be {}, got none", key, JsonKind<T>::kName);
  const json& value = config_.at(key);
  if (!JsonKind<T>::fits(value))
    fail(who_, "expected {} to be {}, got {}", key, JsonKind<T>::kName, brief(value));
  return value.get<T>();
}

#define KILN_JSON_CONFIG_KIND(T)                                            \
  template T JsonConfig::get<T>(const std::string&, T default_value) const; \
  template T JsonConfig::require<T>(const std::string&) const;
KILN_JSON_CONFIG_KIND(bool)
KILN_JSON_CONFIG_KIND(int64_t)
KILN_JSON_CONFIG_KIND(double)
KILN_JSON_CONFIG_KIND(std::string)
KILN_JSON_CONFIG_KIND(std::vector<int64_t>)
KILN_JSON_CONFIG_KIND(std::vector<double>)
KILN_JSON_CONFIG_KIND(std::vector<std::string>)
#undef KILN_JSON_CONFIG_KIND

json JsonConfig::object(const std::string& key) const {
  if (!has(key)) return json::object();
  const json& value = config_.at(key);
  if (!value.is_object()) fail(who_, "expected {} to be an object, got {}", key, brief(value));
  return value;
}

std::string JsonConfig::choice(const std::string& key, const std::string& default_value,
                               std::initializer_list<std::string_view> choices) const {
  std::string value = get(key, default_value);
  if (std::find(choices.begin(), choices.end(), value) == choices.end())
    fail(who_, "expected {} to be one of {}, got \"{}\"", key, fmt::join(choices, ", "), value);
  return value;
}

int64_t JsonConfig::positive(const std::string& key, int64_t default_value) const {
  const int64_t value = get(key, default_value);
  if (value < 1) fail(who_, "expected {} to be at least 1, got {}", key, value);
  return value;
}

void JsonConfig::refuse(const std::string& key, const json& inactive) const {
  if (has(key) && config_.at(key) != inactive)
    fail(who_, "{} = {} is not implemented: expected {}", key, brief(config_.at(key)), inactive.dump());
}

void JsonConfig::refuse_unknown() const {
  std::vector<std::string> unknown;
  for (const auto& [key, value] : config_.items()) {
    if (key.starts_with('_') || read_.contains(key) || value.is_null()) continue;
    if (value.is_boolean() && !value.get<bool>() && !is_near_one_of(key, read_)) continue;
    unknown.push_back(key);
  }
  if (!unknown.empty())
    fail(who_, "unknown config keys: {}; the nearest known ones are {}", some_of(unknown),
         some_of(nearest_names(unknown.front(), {read_.begin(), read_.end()}, 3)));
}

}  // namespace kiln
