#include "emoji_list.h"

#include <algorithm>
#include <cctype>
#include <fstream>
#include <sstream>

#include "core/error.h"

namespace kiln::demo {
namespace {

constexpr uint32_t kEmojiPresentation = 0xFE0F;
constexpr uint32_t kFirstSkinTone = 0x1F3FB, kLastSkinTone = 0x1F3FF;

std::string trimmed(const std::string& text) {
  const auto first = text.find_first_not_of(" \t\r");
  if (first == std::string::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t\r") - first + 1);
}

// "# group: NAME" -> NAME.
bool read_heading(const std::string& line, const std::string& prefix, std::string& out) {
  if (!line.starts_with(prefix)) return false;
  out = trimmed(line.substr(prefix.size()));
  return true;
}

std::vector<uint32_t> parse_code_points(const std::string& text) {
  std::vector<uint32_t> code_points;
  std::istringstream words(text);
  for (std::string word; words >> word;) code_points.push_back(std::stoul(word, nullptr, 16));
  return code_points;
}

// The comment reads "GLYPH E15.0 name".
std::string parse_name(const std::string& comment) {
  std::istringstream words(comment);
  std::string glyph, version, name;
  words >> glyph >> version;
  std::getline(words, name);
  return trimmed(name);
}

}  // namespace

bool Emoji::has_skin_tone() const {
  return code_points.size() > 1 && std::any_of(code_points.begin(), code_points.end(), [](uint32_t code) {
           return code >= kFirstSkinTone && code <= kLastSkinTone;
         });
}

std::string Emoji::file_stem() const {
  std::string stem;
  for (uint32_t code : code_points)
    if (code != kEmojiPresentation) stem += fmt::format("{}{:x}", stem.empty() ? "" : "-", code);
  return stem;
}

std::string class_name_of(const std::string& group) {
  std::string name;
  for (char c : group) {
    if (c == '&')
      name += "and";
    else
      name += c == ' ' ? '-' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return name;
}

std::vector<Emoji> read_emoji_list(const std::string& path) {
  std::ifstream file(path);
  if (!file)
    fail("demo-data", "cannot read {}: install Debian's package unicode-data or give --emoji-list", path);
  std::vector<Emoji> emoji;
  std::string group, subgroup;
  for (std::string line; std::getline(file, line);) {
    if (read_heading(line, "# group:", group) || read_heading(line, "# subgroup:", subgroup)) continue;
    const auto semicolon = line.find(';');
    const auto hash = line.find('#', semicolon == std::string::npos ? 0 : semicolon);
    if (line.starts_with('#') || semicolon == std::string::npos || hash == std::string::npos) continue;
    const std::string status = trimmed(line.substr(semicolon + 1, hash - semicolon - 1));
    if (status != "fully-qualified" && status != "component") continue;
    emoji.push_back(
        {parse_code_points(line.substr(0, semicolon)), parse_name(line.substr(hash + 1)), group, subgroup});
  }
  if (emoji.empty())
    fail("demo-data", "expected Unicode's emoji-test.txt, got a file without emoji ({})", path);
  return emoji;
}

}  // namespace kiln::demo
