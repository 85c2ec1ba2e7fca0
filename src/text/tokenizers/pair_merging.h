// The loop of byte-pair encoding, for any way to rank pairs.
#pragma once
#include <cstdint>
#include <optional>
#include <queue>
#include <vector>

#include "text/tokenizers/subword_model.h"

namespace kiln::text {

struct Merge {
  uint64_t rank;  // lower merges first
  int64_t id;     // of both parts together
};

// Merges neighbours in the order of their rank, equal ones from the left, until no pair has one.
// merge_of(left id, right id) returns an optional Merge.
template <class MergeOf>
void merge_pairs(TokenIds& symbols, const MergeOf& merge_of) {
  struct Candidate {
    uint64_t rank;
    size_t position;
    int64_t id;
    bool operator<(const Candidate& other) const {  // the queue's top is the greatest
      return rank != other.rank ? rank > other.rank : position > other.position;
    }
  };
  constexpr size_t kNone = SIZE_MAX;
  const size_t count = symbols.size();
  std::vector<size_t> previous(count), next(count);
  std::vector<bool> is_gone(count, false);
  std::priority_queue<Candidate> candidates;
  const auto consider = [&](size_t left) {
    if (left == kNone || next[left] == kNone) return;
    if (const std::optional<Merge> merge = merge_of(symbols[left], symbols[next[left]]))
      candidates.push({merge->rank, left, merge->id});
  };
  for (size_t i = 0; i < count; ++i) {
    previous[i] = i == 0 ? kNone : i - 1;
    next[i] = i + 1 < count ? i + 1 : kNone;
  }
  for (size_t i = 0; i < count; ++i) consider(i);
  while (!candidates.empty()) {
    const Candidate top = candidates.top();
    candidates.pop();
    if (is_gone[top.position] || next[top.position] == kNone) continue;
    const size_t right = next[top.position];
    // One of the two may have been merged since: what is there now must still make the same token.
    const std::optional<Merge> merge = merge_of(symbols[top.position], symbols[right]);
    if (!merge || merge->id != top.id) continue;
    symbols[top.position] = top.id;
    is_gone[right] = true;
    next[top.position] = next[right];
    if (next[right] != kNone) previous[next[right]] = top.position;
    consider(previous[top.position]);
    consider(top.position);
  }
  size_t kept = 0;
  for (size_t i = 0; i < count; ++i)
    if (!is_gone[i]) symbols[kept++] = symbols[i];
  symbols.resize(kept);
}

}  // namespace kiln::text
