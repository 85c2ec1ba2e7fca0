// Tokens and their ids.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

namespace kiln::text {

class Vocabulary {
 public:
  // Adds a token. A token of the vocabulary gets the new id.
  void set(std::string token, int64_t id) { ids_.insert_or_assign(std::move(token), id); }
  std::optional<int64_t> find(std::string_view token) const {
    const auto found = ids_.find(token);
    return found == ids_.end() ? std::nullopt : std::optional(found->second);
  }
  int64_t size() const { return static_cast<int64_t>(ids_.size()); }

 private:
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
  };
  std::unordered_map<std::string, int64_t, Hash, std::equal_to<>> ids_;
};

}  // namespace kiln::text
