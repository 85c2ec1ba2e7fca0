// Texts that are lists. Torch-free.
#pragma once
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

namespace kiln {

// Returns the parts between separators, without spaces: at least one, which may be empty.
inline std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (const char c : text)
    if (c == separator)
      parts.emplace_back();
    else if (c != ' ')
      parts.back() += c;
  return parts;
}

// Returns the words between spaces and line breaks.
inline std::vector<std::string> words_in(const std::string& text) {
  std::istringstream stream(text);
  return {std::istream_iterator<std::string>(stream), {}};
}

}  // namespace kiln
