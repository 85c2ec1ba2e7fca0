#include "interop/foreign_recipe.h"

#include <algorithm>
#include <cctype>
#include <string_view>

#include "core/error.h"

namespace kiln {

namespace {

using nlohmann::json;

constexpr size_t kMostBytes = 1 << 20;
constexpr int kMostLevels = 16;

class PythonReader {
 public:
  PythonReader(const std::string& text, const std::string& name) : text_(text), name_(name) {}

  json read() {
    for (skip_lines(); at_ < text_.size(); skip_lines()) {
      const std::string key = word();
      if (key.empty() || !take('=') || peek() == '=') refuse();
      values_[key] = value(1);
      skip_blanks(/*lines=*/false);
      if (at_ < text_.size() && text_[at_] != '\n') refuse();
    }
    return values_;
  }

 private:
  [[noreturn]] void refuse() const {
    const std::string_view all = text_;
    const auto line = std::count(all.begin(), all.begin() + static_cast<int64_t>(at_), '\n') + 1;
    const size_t begin = at_ == 0 ? 0 : all.rfind('\n', at_ - 1) + 1;
    fail("recipe", "{} line {} is no plain \"name = value\", which is all that is read of Python: {}", name_,
         line, all.substr(begin, std::min<size_t>(all.find('\n', begin), begin + 60) - begin));
  }

  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

  // Skips spaces and comments, and the ends of lines inside of brackets.
  void skip_blanks(bool lines) {
    for (; at_ < text_.size(); ++at_) {
      const char c = text_[at_];
      if (c == '#')
        while (at_ + 1 < text_.size() && text_[at_ + 1] != '\n') ++at_;
      else if (c == '\\' && at_ + 1 < text_.size() && text_[at_ + 1] == '\n')
        ++at_;
      else if (c != ' ' && c != '\t' && c != '\r' && !(lines && c == '\n'))
        return;
    }
  }

  // Goes to the next statement, which must begin its line.
  void skip_lines() {
    skip_blanks(/*lines=*/true);
    if (at_ > 0 && at_ < text_.size() && text_[at_ - 1] != '\n') refuse();
  }

  bool take(char c) {
    skip_blanks(depth_ > 0);
    if (peek() != c) return false;
    ++at_;
    return true;
  }

  std::string word() {
    skip_blanks(depth_ > 0);
    const size_t begin = at_;
    while (std::isalnum(static_cast<unsigned char>(peek())) || peek() == '_') ++at_;
    return std::isdigit(static_cast<unsigned char>(text_[begin])) ? "" : text_.substr(begin, at_ - begin);
  }

  json value(int level) {
    if (level > kMostLevels) refuse();
    skip_blanks(depth_ > 0);
    const char c = peek();
    if (c == '\'' || c == '"') return strings();
    if (c == '[') return items('[', ']', level);
    if (c == '(') return items('(', ')', level);
    if (c == '{') return pairs('}', ':', level);
    if (std::isdigit(static_cast<unsigned char>(c)) || c == '-' || c == '.') return number();
    const std::string name = word();
    if (name == "None") return nullptr;
    if (name == "True") return true;
    if (name == "False") return false;
    if (name == "dict" && peek() == '(') return pairs(')', '=', level);
    if (name.empty() || !values_.contains(name)) refuse();
    return values_[name];
  }

  json number() {
    const size_t begin = at_;
    while (std::isalnum(static_cast<unsigned char>(peek())) || peek() == '.' || peek() == '_' ||
           ((peek() == '-' || peek() == '+') &&
            (at_ == begin || text_[at_ - 1] == 'e' || text_[at_ - 1] == 'E')))
      ++at_;
    std::string digits = text_.substr(begin, at_ - begin);
    std::erase(digits, '_');
    json value = json::parse(digits, nullptr, /*allow_exceptions=*/false);
    if (value.is_number()) return value;
    size_t end = 0;  // 1. and .5 are numbers in Python alone
    double parsed = 0;
    try {
      parsed = std::stod(digits, &end);
    } catch (const std::exception&) {
      end = 0;
    }
    if (end != digits.size() || digits.find_first_not_of("-+.eE0123456789") != std::string::npos) refuse();
    return parsed;
  }

  // Strings that follow one another are one.
  json strings() {
    std::string all;
    for (; peek() == '\'' || peek() == '"'; skip_blanks(depth_ > 0)) {
      const char quote = text_[at_++];
      for (; peek() != quote; ++at_) {
        if (peek() == '\0' || peek() == '\n') refuse();
        all += peek() == '\\' ? escaped() : std::string(1, peek());
      }
      ++at_;
    }
    return all;
  }

  // Reads one escape of a string, up to its last character. Python keeps those that it does not know.
  std::string escaped() {
    if (++at_ == text_.size()) refuse();
    const char c = peek();
    if (c == '\n') return "";
    if (c == '\\' || c == '\'' || c == '"') return {c};
    if (c == 'n') return "\n";
    if (c == 't') return "\t";
    if (c == 'r') return "\r";
    if (std::isdigit(static_cast<unsigned char>(c)) ||
        std::string_view("xuUNabfv").find(c) != std::string_view::npos)
      refuse();
    return {'\\', c};
  }

  json items(char open, char close, int level) {
    take(open);
    ++depth_;
    json list = json::array();
    bool has_comma = false;
    while (!take(close)) {
      if (!list.empty() && !has_comma) refuse();
      list.push_back(value(level + 1));
      has_comma = take(',');
    }
    --depth_;
    if (open == '(' && list.size() == 1 && !has_comma) return list[0];  // only brackets
    return list;
  }

  // Reads {"key": value} and dict(key=value).
  json pairs(char close, char sign, int level) {
    ++at_;
    ++depth_;
    json object = json::object();
    bool has_comma = true;
    while (!take(close)) {
      if (!has_comma) refuse();
      const json key = sign == '=' ? json(word()) : value(level + 1);
      if (!key.is_string() || key == "" || !take(sign)) refuse();
      object[key.get<std::string>()] = value(level + 1);
      has_comma = take(',');
    }
    --depth_;
    return object;
  }

  const std::string& text_;
  const std::string& name_;
  size_t at_ = 0;
  int depth_ = 0;  // of brackets
  json values_ = json::object();
};

}  // namespace

json parse_python_config(const std::string& text, const std::string& name) {
  if (text.size() > kMostBytes)
    fail("recipe", "{} has {} bytes, a config has at most {}", name, text.size(), kMostBytes);
  return PythonReader(text, name).read();
}

json inherit_python_config(json base, const json& config) {
  for (const auto& [key, value] : config.items()) {
    const bool merges =
        value.is_object() && !value.contains("_delete_") && base.contains(key) && base[key].is_object();
    base[key] = merges ? inherit_python_config(base[key], value) : value;
    if (base[key].is_object()) base[key].erase("_delete_");
  }
  return base;
}

}  // namespace kiln
