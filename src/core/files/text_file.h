// Small text files of users: recipes, configurations, instructions. Torch-free.
#pragma once
#include <cstddef>
#include <string>
#include <string_view>

namespace kiln {

inline constexpr size_t kMostTextBytes = 1 << 20;

// Returns the whole text of a file or pipe, with "\n" for "\r\n". Throws Error of `who` naming the path: it
// cannot be read, or has more than kMostTextBytes.
std::string read_text_file(std::string_view who, const std::string& path);

// Returns the text with `by` in the place of every `what`.
std::string replaced(std::string_view text, std::string_view what, std::string_view by);

}  // namespace kiln
