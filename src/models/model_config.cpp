#include "models/model_config.h"

#include <algorithm>

#include "core/error.h"

namespace kiln {
namespace {

using nlohmann::json;

// 4.0 is an integer too: configs written by other tools hold such numbers.
bool is_integer(const json& value) {
  return value.is_number_integer() ||
         (value.is_number_float() && value.get<double>() == static_cast<double>(value.get<int64_t>()));
}
bool is_number(const json& value) { return value.is_number(); }
bool is_boolean(const json& value) { return value.is_boolean(); }
bool is_text(const json& value) { return value.is_string(); }
bool are_integers(const json& value) {
  return value.is_array() && std::all_of(value.begin(), value.end(), is_integer);
}
bool are_texts(const json& value) {
  return value.is_array() && std::all_of(value.begin(), value.end(), is_text);
}

}  // namespace

ConfigReader::ConfigReader(const json& config, std::string who) : config_(config), who_(std::move(who)) {
  if (!config.is_object()) fail(who_, "the config must be a JSON object, got {}", config.type_name());
}

template <class T>
T ConfigReader::get(const std::string& key, const T& default_value, bool (*has_type)(const json&),
                    const char* type) {
  read_.insert(key);
  const auto found = config_.find(key);
  if (found == config_.end() || found->is_null()) return default_value;
  if (!has_type(*found)) fail(who_, "config key {} must be {}, got {}", key, type, found->dump());
  return found->get<T>();
}

int64_t ConfigReader::integer(const std::string& key, int64_t default_value) {
  return get<int64_t>(key, default_value, is_integer, "an integer");
}
double ConfigReader::number(const std::string& key, double default_value) {
  return get<double>(key, default_value, is_number, "a number");
}
bool ConfigReader::boolean(const std::string& key, bool default_value) {
  return get<bool>(key, default_value, is_boolean, "true or false");
}
std::string ConfigReader::text(const std::string& key, const std::string& default_value) {
  return get<std::string>(key, default_value, is_text, "a string");
}
std::vector<int64_t> ConfigReader::integers(const std::string& key,
                                            const std::vector<int64_t>& default_value) {
  return get<std::vector<int64_t>>(key, default_value, are_integers, "a list of integers");
}
std::vector<std::string> ConfigReader::texts(const std::string& key,
                                             const std::vector<std::string>& default_value) {
  return get<std::vector<std::string>>(key, default_value, are_texts, "a list of strings");
}

void ConfigReader::refuse_unknown() const {
  std::string unknown;
  for (const auto& [key, value] : config_.items())
    if (!key.starts_with('_') && !read_.contains(key)) unknown += (unknown.empty() ? "" : ", ") + key;
  if (unknown.empty()) return;
  std::string known;
  for (const std::string& key : read_) known += (known.empty() ? "" : ", ") + key;
  fail(who_, "unknown config keys: {}; known are {}", unknown, known);
}

}  // namespace kiln
