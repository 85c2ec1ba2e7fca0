#include "core/text/yaml.h"

#include <yaml-cpp/yaml.h>

#include <cmath>

#include "core/error.h"
#include "core/files/text_file.h"

namespace kiln {

namespace {

using nlohmann::json;

constexpr int kMostLevels = 16, kMostValues = 20'000;

class Reader {
 public:
  Reader(std::string_view who, const std::string& name) : who_(who), name_(name) {}

  json value_of(const YAML::Node& node, int level) {
    if (level > kMostLevels || ++num_values_ > kMostValues)
      refuse(node.Mark(), fmt::format("goes beyond {} levels or {} values", kMostLevels, kMostValues));
    if (node.IsMap()) return object_of(node, level);
    if (node.IsScalar()) return scalar_of(node);
    if (!node.IsSequence()) return nullptr;
    json items = json::array();
    for (const YAML::Node& item : node) items.push_back(value_of(item, level + 1));
    return items;
  }

  [[noreturn]] void refuse(const YAML::Mark& mark, const std::string& what) const {
    fail(who_, "{} line {} {}", name_, mark.line + 1, what);
  }

 private:
  json object_of(const YAML::Node& node, int level) {
    json object = json::object();
    for (const auto& entry : node) {
      const YAML::Node &key = entry.first, &value = entry.second;
      if (!key.IsScalar()) refuse(key.Mark(), "has a key that is no word");
      const std::string& name = key.Scalar();
      if (object.contains(name)) refuse(key.Mark(), fmt::format("gives {} a second time", name));
      object[name] = value_of(value, level + 1);
    }
    return object;
  }

  static json scalar_of(const YAML::Node& node) {
    const std::string& text = node.Scalar();
    if (node.Tag() == "!") return text;  // in quotes
    if (text.empty() || text == "~" || text == "null") return nullptr;
    if (text == "true" || text == "True") return true;
    if (text == "false" || text == "False") return false;
    json value = json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (value.is_number()) return value;
    double number = 0;  // YAML also writes 1.e-4 and .5
    const bool is_number = text.find_first_of("0123456789") != std::string::npos &&
                           text.find_first_not_of("+-.eE0123456789") == std::string::npos;
    if (is_number && YAML::convert<double>::decode(node, number) && std::isfinite(number)) return number;
    return text;
  }

  std::string_view who_;
  const std::string& name_;
  int num_values_ = 0;
};

}  // namespace

json parse_yaml(std::string_view who, std::string text, const std::string& name) {
  if (text.size() > kMostTextBytes)
    fail(who, "{} has {} bytes, a config has at most {}", name, text.size(), kMostTextBytes);
  for (const std::string_view space : {"\xC2\xA0", "\xE2\x80\xAF"}) text = replaced(text, space, " ");
  Reader reader(who, name);
  try {
    const YAML::Node document = YAML::Load(text);
    if (document.IsNull()) return json::object();
    if (!document.IsMap()) reader.refuse(document.Mark(), "is no \"key: value\" of a configuration");
    return reader.value_of(document, 1);
  } catch (const YAML::Exception& error) {
    reader.refuse(error.mark, fmt::format("is no \"key: value\" of a configuration: {}", error.msg));
  }
}

json read_yaml(std::string_view who, const std::string& path) {
  return parse_yaml(who, read_text_file(who, path), path);
}

}  // namespace kiln
