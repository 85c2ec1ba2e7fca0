#include "core/files/text_file.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "core/error.h"

namespace kiln {

std::string read_text_file(std::string_view who, const std::string& path) {
  std::error_code unreachable;  // then opening it says why
  if (std::filesystem::is_directory(path, unreachable))
    fail(who, "cannot read {}: it is a folder, a file is needed", path);
  std::ifstream file(path, std::ios::binary);
  std::string text(kMostTextBytes + 1, '\0');  // a pipe does not say how long it is
  if (file) file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (!file && !file.eof()) fail(who, "cannot read {}: {}", path, std::strerror(errno));
  text.resize(static_cast<size_t>(file.gcount()));
  if (text.size() > kMostTextBytes)
    fail(who, "cannot read {}: expected a text of at most {} bytes, it has more", path, kMostTextBytes);
  return replaced(text, "\r\n", "\n");
}

std::string replaced(std::string_view text, std::string_view what, std::string_view by) {
  std::string result;
  result.reserve(text.size());
  for (size_t at = text.find(what); at != text.npos; at = text.find(what)) {
    result.append(text.substr(0, at)).append(by);
    text.remove_prefix(at + what.size());
  }
  return result.append(text);
}

}  // namespace kiln
