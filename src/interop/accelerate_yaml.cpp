#include "interop/accelerate_config.h"

#include <sstream>
#include <vector>

#include "core/error.h"

namespace kiln {
namespace {

using nlohmann::json;

struct Line {
  size_t number = 0, indent = 0;
  std::string text;  // without indentation and comment
};

std::string trimmed(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t\r\n"), last = text.find_last_not_of(" \t\r\n");
  return first == std::string::npos ? "" : text.substr(first, last - first + 1);
}

// Cuts off a comment, which begins with # at the start or after a space, outside of quotes.
std::string without_comment(const std::string& text) {
  char quote = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (quote != 0)
      quote = text[i] == quote ? 0 : quote;
    else if (text[i] == '"' || text[i] == '\'')
      quote = text[i];
    else if (text[i] == '#' && (i == 0 || text[i - 1] == ' '))
      return text.substr(0, i);
  }
  return text;
}

// Replaces no-break spaces, which text copied from a web page has as indentation.
std::string with_plain_spaces(std::string text) {
  for (const std::string_view space : {"\xC2\xA0", "\xE2\x80\xAF"})
    for (size_t at = 0; (at = text.find(space, at)) != std::string::npos;)
      text.replace(at, space.size(), " ");
  return text;
}

std::vector<Line> lines_of(const std::string& text) {
  std::vector<Line> lines;
  std::istringstream stream(with_plain_spaces(text));
  size_t number = 0;
  for (std::string line; std::getline(stream, line);) {
    ++number;
    const std::string content = without_comment(line);
    if (trimmed(content).empty() || trimmed(content) == "---") continue;
    lines.push_back({.number = number, .indent = content.find_first_not_of(' '), .text = trimmed(content)});
  }
  return lines;
}

// Reads JSON values, which are YAML too, and YAML's other words for null, true and false. Anything else is a
// string.
json scalar_of(const std::string& text) {
  if (text.empty() || text == "~" || text == "null") return nullptr;
  if (text == "true" || text == "True") return true;
  if (text == "false" || text == "False") return false;
  if (text.size() >= 2 && text.front() == '\'' && text.back() == '\'') return text.substr(1, text.size() - 2);
  json value = json::parse(text, nullptr, /*allow_exceptions=*/false);
  return value.is_discarded() ? json(text) : value;
}

class Parser {
 public:
  Parser(std::vector<Line> lines, const std::string& name) : lines_(std::move(lines)), name_(name) {}

  json parse() {
    const json document = lines_.empty() ? json::object() : block(lines_[0].indent);
    if (next_ < lines_.size()) refuse(lines_[next_]);
    return document;
  }

 private:
  [[noreturn]] void refuse(const Line& line) const {
    fail("accelerate", "{} line {} is no \"key: value\" of a configuration: {}", name_, line.number,
         line.text);
  }

  // Parses the lines of one indentation: a list or a mapping.
  json block(size_t indent) {
    if (lines_[next_].text.starts_with("-")) return list(indent);
    json object = json::object();
    while (next_ < lines_.size() && lines_[next_].indent == indent) {
      const Line& line = lines_[next_++];
      const size_t colon = line.text.find(':');
      const bool ends_key =
          colon != std::string::npos && (colon + 1 == line.text.size() || line.text[colon + 1] == ' ');
      if (!ends_key || colon == 0) refuse(line);
      const std::string key = trimmed(line.text.substr(0, colon)),
                        rest = trimmed(line.text.substr(colon + 1));
      if (object.contains(key))
        fail("accelerate", "{} line {} gives {} a second time", name_, line.number, key);
      object[key] = rest.empty() ? below(indent) : scalar_of(rest);
    }
    return object;
  }

  // Parses the value of a key that has none on its own line: deeper lines, or a list at the key's
  // indentation.
  json below(size_t indent) {
    if (next_ >= lines_.size()) return nullptr;
    const Line& first = lines_[next_];
    const bool is_list = first.indent == indent && first.text.starts_with("-");
    return first.indent > indent || is_list ? block(first.indent) : json();
  }

  json list(size_t indent) {
    json items = json::array();
    while (next_ < lines_.size() && lines_[next_].indent == indent && lines_[next_].text.starts_with("-"))
      items.push_back(scalar_of(trimmed(lines_[next_++].text.substr(1))));
    return items;
  }

  std::vector<Line> lines_;
  std::string name_;
  size_t next_ = 0;
};

}  // namespace

json parse_accelerate_yaml(const std::string& text, const std::string& name) {
  const std::string plain = with_plain_spaces(text);
  if (!trimmed(plain).starts_with('{')) return Parser(lines_of(text), name).parse();
  // accelerate's write_basic_config() writes JSON, which is YAML too, whatever the file is called.
  const json file = json::parse(plain, nullptr, /*allow_exceptions=*/false);
  if (!file.is_object()) fail("accelerate", "{} begins like JSON, but is no JSON object", name);
  return file;
}

}  // namespace kiln
