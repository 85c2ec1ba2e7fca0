#include "annotations.h"

#include <fstream>

#include "core/error.h"
#include "text/tokenizers/unicode.h"

namespace kiln::demo {
namespace {

constexpr uint32_t kVariationSelector = 0xFE0F;

void replace_all(std::string& text, const std::string& from, const std::string& to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size()))
    text.replace(at, from.size(), to);
}

std::string unescaped(std::string text) {
  for (const auto& [entity, character] :
       {std::pair{"&lt;", "<"}, {"&gt;", ">"}, {"&quot;", "\""}, {"&amp;", "&"}})
    replace_all(text, entity, character);
  return text;
}

// What stands between `before` and `after`; "" when the line has no such part.
std::string between(const std::string& line, const std::string& before, const std::string& after) {
  const size_t begin = line.find(before);
  if (begin == std::string::npos) return "";
  const size_t first = begin + before.size(), last = line.find(after, first);
  return last == std::string::npos ? "" : unescaped(line.substr(first, last - first));
}

}  // namespace

void read_annotations(const std::string& path, Annotations& annotations) {
  std::ifstream file(path);
  if (!file) fail("demo-data", "--annotations {} cannot be read: install Debian's unicode-cldr-core", path);
  const size_t before = annotations.size();
  for (std::string line; std::getline(file, line);) {
    // The name of an emoji, type="tts", is in emoji-test.txt as well.
    const std::string characters = between(line, "<annotation cp=\"", "\">");
    std::string keywords = between(line, "\">", "</annotation>");
    if (characters.empty() || keywords.empty() || characters.find("type=") != std::string::npos) continue;
    replace_all(keywords, " | ", ", ");
    annotations[characters] = std::move(keywords);
  }
  if (annotations.size() == before)
    fail("demo-data", "--annotations {} has no <annotation cp=...>: give annotations of CLDR", path);
}

std::string keywords_of(const Annotations& annotations, const std::vector<uint32_t>& code_points) {
  std::string characters;
  for (const uint32_t code_point : code_points)
    if (code_point != kVariationSelector) text::append_utf8(characters, code_point);
  const auto found = annotations.find(characters);
  return found == annotations.end() ? "" : found->second;
}

}  // namespace kiln::demo
