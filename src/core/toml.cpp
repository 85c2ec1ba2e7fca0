#include "core/toml.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>
#include <iterator>
#include <limits>

#include "core/error.h"

namespace kiln {

namespace {

class TomlParser {
 public:
  TomlParser(std::string_view text, const std::string& name) : text_(text), name_(name) {}

  std::vector<TomlEntry> parse() {
    std::vector<TomlEntry> entries;
    for (skip_lines(); !at_end(); skip_lines()) {
      if (peek() == '[') refuse("tables are not supported: recipes are flat lists of options");
      TomlEntry entry{.key = parse_key(), .value = {}, .line = line_};
      if (std::ranges::find(entries, entry.key, &TomlEntry::key) != entries.end())
        refuse(fmt::format("{} is set twice", entry.key));
      skip_spaces();
      if (at_end() || peek() != '=') refuse(fmt::format("expected = after {}", entry.key));
      ++position_;
      skip_spaces();
      entry.value = peek_or_zero() == '[' ? parse_array() : parse_scalar();
      skip_spaces();
      skip_comment();
      if (!at_end() && peek() != '\n')
        refuse(fmt::format("expected the end of the line after {}", entry.key));
      entries.push_back(std::move(entry));
    }
    return entries;
  }

 private:
  bool at_end() const { return position_ >= text_.size(); }
  char peek() const { return text_[position_]; }
  char peek_or_zero() const { return at_end() ? '\0' : peek(); }

  [[noreturn]] void refuse(const std::string& what) const {
    fail("toml", "{} line {}: {}", name_, line_, what);
  }

  void skip_spaces() {
    while (!at_end() && (peek() == ' ' || peek() == '\t' || peek() == '\r')) ++position_;
  }
  void skip_comment() {
    if (peek_or_zero() != '#') return;
    while (!at_end() && peek() != '\n') ++position_;
  }
  void skip_lines() {
    for (;;) {
      skip_spaces();
      skip_comment();
      if (at_end() || peek() != '\n') return;
      ++position_;
      ++line_;
    }
  }

  static bool is_bare(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
  }

  std::string parse_key() {
    if (peek() == '"' || peek() == '\'') return parse_string();
    const size_t begin = position_;
    while (!at_end() && is_bare(peek())) ++position_;
    if (position_ == begin) refuse("expected an option name");
    return std::string(text_.substr(begin, position_ - begin));
  }

  std::string parse_string() {
    const char quote = peek();
    ++position_;
    std::string value;
    while (!at_end() && peek() != '\n') {
      char c = text_[position_++];
      if (c == quote) return value;
      if (c == '\\' && quote == '"') c = parse_escape();
      value += c;
    }
    refuse("a string is not closed");
  }

  char parse_escape() {
    static constexpr std::string_view kNames = "\"\\bfnrt", kCharacters = "\"\\\b\f\n\r\t";
    const size_t which = at_end() ? std::string_view::npos : kNames.find(text_[position_++]);
    if (which == std::string_view::npos) refuse("unknown escape in a string");
    return kCharacters[which];
  }

  nlohmann::json parse_array() {
    nlohmann::json array = nlohmann::json::array();
    ++position_;
    for (;;) {
      skip_lines();
      if (at_end()) refuse("an array is not closed");
      if (peek() == ']') break;
      array.push_back(parse_scalar());
      skip_lines();
      if (peek_or_zero() == ',')
        ++position_;
      else if (!at_end() && peek() != ']')
        refuse("expected , or ] in an array");
    }
    ++position_;
    return array;
  }

  nlohmann::json parse_scalar() {
    if (at_end()) refuse("expected a value");
    if (peek() == '"' || peek() == '\'') return parse_string();
    const size_t begin = position_;
    while (!at_end() && (is_bare(peek()) || peek() == '.' || peek() == '+')) ++position_;
    const std::string word(text_.substr(begin, position_ - begin));
    if (word == "true") return true;
    if (word == "false") return false;
    return parse_number(word);
  }

  nlohmann::json parse_number(const std::string& word) const {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    if (word == "inf" || word == "+inf") return kInfinity;
    if (word == "-inf") return -kInfinity;
    if (word == "nan" || word == "+nan" || word == "-nan") return std::nan("");
    std::string digits = word.starts_with('+') ? word.substr(1) : word;
    std::erase(digits, '_');
    const char* end = digits.data() + digits.size();
    int64_t integer = 0;
    if (const auto [rest, error] = std::from_chars(digits.data(), end, integer);
        error == std::errc() && rest == end)
      return integer;
    uint64_t large = 0;
    if (const auto [rest, error] = std::from_chars(digits.data(), end, large);
        error == std::errc() && rest == end)
      return large;
    double number = 0;
    const bool starts_like_one =
        !digits.empty() && (std::isdigit(static_cast<unsigned char>(digits[0])) || digits[0] == '-');
    if (const auto [rest, error] = std::from_chars(digits.data(), end, number);
        starts_like_one && error == std::errc() && rest == end)
      return number;
    refuse(fmt::format("expected a string in quotes, a number, true, false or an array, got '{}'", word));
  }

  std::string_view text_;
  const std::string& name_;
  size_t position_ = 0;
  int line_ = 1;
};

}  // namespace

std::vector<TomlEntry> parse_toml(std::string_view text, const std::string& name) {
  return TomlParser(text, name).parse();
}

std::vector<TomlEntry> read_toml(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file) fail("toml", "cannot read {}", path);
  return parse_toml(text, path);
}

}  // namespace kiln
