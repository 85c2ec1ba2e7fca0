// Typed reading of the JSON configs of objectives and samplers.
#pragma once
#include <fmt/ranges.h>

#include <algorithm>
#include <concepts>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "core/error.h"

namespace kiln {

// Reads optional keys of one JSON object. Absent and null both mean the default; a value of the wrong kind
// throws Error naming `who` and the key.
class DiffusionConfig {
 public:
  DiffusionConfig(std::string_view who, const nlohmann::json& config) : who_(who), config_(config) {
    if (!config.is_object()) fail(who_, "expected a JSON object, got {}", config.dump());
  }

  bool has(const std::string& key) const { return config_.contains(key) && !config_.at(key).is_null(); }
  const nlohmann::json& at(const std::string& key) const { return config_.at(key); }

  template <class T>
  T get(const std::string& key, T default_value) const {
    if (!has(key)) return default_value;
    const nlohmann::json& value = config_.at(key);
    if constexpr (std::same_as<T, bool>) {
      if (!value.is_boolean()) fail(who_, "expected {} to be true or false, got {}", key, value.dump());
    } else if constexpr (std::integral<T>) {
      if (!value.is_number_integer()) fail(who_, "expected {} to be an integer, got {}", key, value.dump());
    } else if constexpr (std::floating_point<T>) {
      if (!value.is_number()) fail(who_, "expected {} to be a number, got {}", key, value.dump());
    } else {
      if (!value.is_string()) fail(who_, "expected {} to be a string, got {}", key, value.dump());
    }
    return value.get<T>();
  }

  // A string that must be one of `choices`.
  std::string choice(const std::string& key, const std::string& default_value,
                     std::initializer_list<std::string_view> choices) const {
    const std::string value = get<std::string>(key, default_value);
    if (std::find(choices.begin(), choices.end(), value) == choices.end())
      fail(who_, "expected {} to be one of {}, got \"{}\"", key, fmt::join(choices, ", "), value);
    return value;
  }

  int64_t positive(const std::string& key, int64_t default_value) const {
    const int64_t value = get<int64_t>(key, default_value);
    if (value < 1) fail(who_, "expected {} to be at least 1, got {}", key, value);
    return value;
  }

  // A key that Kiln does not implement must keep its inactive value: silently ignoring it would change the
  // images.
  void refuse(const std::string& key, const nlohmann::json& inactive) const {
    if (has(key) && config_.at(key) != inactive)
      fail(who_, "{} = {} is not implemented: expected {}", key, config_.at(key).dump(), inactive.dump());
  }

  const std::string& who() const { return who_; }

 private:
  std::string who_;
  const nlohmann::json& config_;
};

}  // namespace kiln
