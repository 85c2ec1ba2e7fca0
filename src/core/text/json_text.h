// JSON that others wrote. Torch-free.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/json.h"

namespace kiln {

// Whatever copies, prints or walks a value calls itself for each level of it.
inline constexpr size_t kMostJsonLevels = 64;

struct JsonOptions {
  size_t most_bytes = size_t{256} << 20;
  int64_t most_values = int64_t{4} << 20;  // each takes some hundred bytes of memory
  bool ignores_comments = false;
  bool refuses_duplicates = false;  // of keys; otherwise the last one counts
  std::string_view only_key{};      // of the outermost object; what else is in it is read past
};
// These are for lists with an entry for each picture.
inline constexpr JsonOptions kLongList = {.most_bytes = size_t{16} << 30, .most_values = int64_t{1} << 30};

// Throws Error of `who` naming `name`: not JSON, more than kMostJsonLevels, or beyond the options.
nlohmann::json parse_json(std::string_view who, std::string_view text, const std::string& name,
                          const JsonOptions& options = {});
// The same, but the value is_discarded() if the text is not JSON.
nlohmann::json json_or_discarded(std::string_view who, std::string_view text, const std::string& name,
                                 const JsonOptions& options = {});
// The same for files. Throw Error too if it cannot be read.
nlohmann::json read_json_file(std::string_view who, const std::string& path, const JsonOptions& options = {});
nlohmann::json read_json_or_discarded(std::string_view who, const std::string& path);

// Returns the text for a message, the begin of it if it is long; or the JSON of a value.
std::string brief(std::string text);
std::string brief(const nlohmann::json& value);

}  // namespace kiln
