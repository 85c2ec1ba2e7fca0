// Typed reading of JSON configs, with errors that name who reads, the key and what came. Torch-free.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace kiln {

// The object that an option is given: JSON text, or the path of a file that holds it; {} for "". Throws Error
// naming `option` for anything else.
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
  bool has(const std::string& key) const;  // and is not null
  const nlohmann::json& at(const std::string& key) const { return config_.at(key); }

  // T: bool, int64_t, double, std::string, or a std::vector of one of the last three.
  template <class T>
  T get(const std::string& key, T default_value) const;
  // The same for a key that must be there.
  template <class T>
  T require(const std::string& key) const;

  // {} when absent or null; throws Error for anything but an object.
  nlohmann::json object(const std::string& key) const;

  // A string that must be one of `choices`.
  std::string choice(const std::string& key, const std::string& default_value,
                     std::initializer_list<std::string_view> choices) const;
  // An integer of at least 1.
  int64_t positive(const std::string& key, int64_t default_value) const;

  // A key that Kiln does not implement must keep its inactive value: silently ignoring it would change the
  // images.
  void refuse(const std::string& key, const nlohmann::json& inactive) const;
  // Throws Error naming every key that has not been asked for so far. Keys beginning with "_" pass; null
  // means absent; so does false, what other tools write for a feature that is off, but under a name unlike
  // any known.
  void refuse_unknown() const;

 private:
  std::string who_;
  const nlohmann::json& config_;
  mutable std::set<std::string> read_;
};

}  // namespace kiln
