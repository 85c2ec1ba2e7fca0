// Typed reading of JSON configs. Errors name the reader, the key and what was found. Torch-free.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/json.h"

namespace kiln {

// Returns the text that an option's value stands for: itself, or the contents of the file or pipe of that
// name without a line break at their end. Throws Error naming `option` if that cannot be read or has more
// than 1 MiB.
std::string read_text_option(std::string_view who, std::string_view option, const std::string& value);
// Returns the object that an option's value stands for: JSON text or the path of a file that holds it; {} for
// "". Throws Error naming `option` for anything else.
nlohmann::json read_json_option(std::string_view who, std::string_view option, const std::string& value);

// Reads optional keys of one JSON object. Absent and null both mean the default; a value of the wrong kind
// throws Error naming `who` and the key. 4.0 is an integer too: configs written by other tools hold such
// numbers.
class JsonConfig {
 public:
  // Keeps a reference to `config`. Throws Error when it is not an object.
  JsonConfig(std::string_view who, const nlohmann::json& config);
  JsonConfig(std::string_view who, nlohmann::json&& config) = delete;

  const std::string& who() const { return who_; }
  bool has(const std::string& key) const;  // false if it is null
  const nlohmann::json& at(const std::string& key) const { return config_.at(key); }

  // T: bool, int64_t, double, std::string, or a std::vector of one of the last three.
  template <class T>
  T get(const std::string& key, T default_value) const;
  // The same, but throws Error if the key is absent or null.
  template <class T>
  T require(const std::string& key) const;

  // Returns {} when absent or null; throws Error for anything but an object.
  nlohmann::json object(const std::string& key) const;

  // Returns a string that must be one of `choices`.
  std::string choice(const std::string& key, const std::string& default_value,
                     std::initializer_list<std::string_view> choices) const;
  // Returns an integer of at least 1.
  int64_t positive(const std::string& key, int64_t default_value) const;

  // Throws Error if a key that Kiln does not implement has another value than `inactive`: silently ignoring
  // it would change the images.
  void refuse(const std::string& key, const nlohmann::json& inactive) const;
  // Throws Error naming every key that has not been asked for so far. Keys that begin with "_" and null
  // values pass. So does false, which other tools write for a feature that is off, unless the key looks like
  // a mistyped known one.
  void refuse_unknown() const;

 private:
  std::string who_;
  const nlohmann::json& config_;
  mutable std::set<std::string> read_;
};

}  // namespace kiln
