// Finds the tokens that texts begin with in common, such as an instruction.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace kiln {

inline constexpr int64_t kLeastShared = 16;  // a shorter prefix is not worth its own pass
// Returns the prefix that saves the most tokens when it is computed once. With n texts that continue it, a
// prefix saves n - 1 times its length. Returns an empty one when no two texts share kLeastShared tokens.
std::vector<int64_t> best_shared_prefix(std::span<const std::vector<int64_t>> texts);

// True if the text begins with the prefix and has a token after it. False for an empty prefix.
bool goes_on_after(std::span<const int64_t> text, std::span<const int64_t> prefix);

}  // namespace kiln
