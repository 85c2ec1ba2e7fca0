#include "models/text/caption_encoder.h"

#include <algorithm>

namespace kiln {
namespace {

using Tokens = std::span<const int64_t>;

// Returns the tokens of a text except the last, so that one is left after any prefix.
Tokens without_last(const std::vector<int64_t>& text) {
  return Tokens(text).first(text.empty() ? 0 : text.size() - 1);
}

int64_t common_length(Tokens a, Tokens b) { return std::ranges::mismatch(a, b).in1 - a.begin(); }

}  // namespace

std::vector<int64_t> best_shared_prefix(std::span<const std::vector<int64_t>> texts) {
  std::vector<Tokens> sorted;
  for (const std::vector<int64_t>& text : texts) sorted.push_back(without_last(text));
  std::ranges::sort(sorted, [](Tokens a, Tokens b) { return std::ranges::lexicographical_compare(a, b); });
  // Texts that share a prefix are neighbours now. The best prefix is the largest rectangle in the histogram
  // of the lengths that neighbours share.
  struct Open {
    size_t first;
    int64_t length;
  };
  std::vector<Open> open;
  Open best{.first = 0, .length = 0};
  int64_t most = 0;
  for (size_t i = 1; i <= sorted.size(); ++i) {
    const int64_t shared = i < sorted.size() ? common_length(sorted[i - 1], sorted[i]) : 0;
    size_t first = i - 1;
    while (!open.empty() && open.back().length >= shared) {
      const int64_t saved = open.back().length * static_cast<int64_t>(i - 1 - open.back().first);
      if (open.back().length >= kLeastShared && saved > most) {
        most = saved;
        best = open.back();
      }
      first = open.back().first;
      open.pop_back();
    }
    open.push_back({.first = first, .length = shared});
  }
  if (most == 0) return {};
  const Tokens prefix = sorted[best.first].first(static_cast<size_t>(best.length));
  return {prefix.begin(), prefix.end()};
}

bool goes_on_after(Tokens text, Tokens prefix) {
  return !prefix.empty() && text.size() > prefix.size() &&
         std::ranges::equal(text.first(prefix.size()), prefix);
}

}  // namespace kiln
