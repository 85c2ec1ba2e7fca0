// Finds all entries of a vocabulary that a text begins with.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kiln::text {

class PrefixIndex {
 public:
  PrefixIndex() = default;
  explicit PrefixIndex(std::vector<std::pair<std::string, int64_t>> entries) : entries_(std::move(entries)) {
    std::sort(entries_.begin(), entries_.end());
  }

  // Calls visit(bytes, id) for each entry that is a prefix of `text`, the shortest first.
  template <class Visit>
  void visit_prefixes(std::string_view text, const Visit& visit) const {
    auto first = entries_.begin(), last = entries_.end();  // those that agree with the bytes so far
    for (size_t depth = 0; depth < text.size() && first != last; ++depth) {
      const auto byte_of = [depth](const auto& entry) {
        return static_cast<int>(static_cast<unsigned char>(entry.first[depth]));
      };
      const int byte = static_cast<unsigned char>(text[depth]);
      first = std::partition_point(first, last, [&](const auto& entry) {
        return entry.first.size() <= depth || byte_of(entry) < byte;
      });
      last = std::partition_point(first, last, [&](const auto& entry) { return byte_of(entry) == byte; });
      if (first != last && first->first.size() == depth + 1) visit(depth + 1, first->second);
    }
  }

 private:
  std::vector<std::pair<std::string, int64_t>> entries_;  // sorted by their bytes
};

}  // namespace kiln::text
