// Typed reading of a model's JSON config, with errors that name the model, the key and what came.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

namespace kiln {

// Absent and null keys give the default. Throws Error for a wrong type.
class ConfigReader {
 public:
  // Keeps a reference to `config`. Throws Error when it is not an object.
  ConfigReader(const nlohmann::json& config, std::string who);

  int64_t integer(const std::string& key, int64_t default_value);
  double number(const std::string& key, double default_value);
  bool boolean(const std::string& key, bool default_value);
  std::string text(const std::string& key, const std::string& default_value);
  std::vector<int64_t> integers(const std::string& key, const std::vector<int64_t>& default_value);
  std::vector<std::string> texts(const std::string& key, const std::vector<std::string>& default_value);
  // Throws Error naming every key that was not read; keys beginning with "_" pass.
  void refuse_unknown() const;

 private:
  template <class T>
  T get(const std::string& key, const T& default_value, bool (*has_type)(const nlohmann::json&),
        const char* type);

  const nlohmann::json& config_;
  std::string who_;
  std::set<std::string> read_;
};

}  // namespace kiln
