// Which tokens a list of texts has in common, such as an instruction before each of them.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace kiln {

// The prefix that saves the most tokens when it is computed once. It saves its length times the number of
// texts that go on after it, less one. Empty when no two texts share kLeastShared tokens.
inline constexpr int64_t kLeastShared = 16;  // what is shorter is not worth a pass of its own
std::vector<int64_t> best_shared_prefix(std::span<const std::vector<int64_t>> texts);

// Whether the text begins with the prefix and has a token after it. False for an empty prefix.
bool goes_on_after(std::span<const int64_t> text, std::span<const int64_t> prefix);

}  // namespace kiln
