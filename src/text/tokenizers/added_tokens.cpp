#include "text/tokenizers/added_tokens.h"

#include <unicode/uchar.h>

#include <algorithm>

#include "core/error.h"
#include "text/tokenizers/unicode.h"

namespace kiln::text {
namespace {

// True for letters, marks, digits and connectors: \w of regular expressions.
bool is_word_character(char32_t c) {
  const auto mask = U_GET_GC_MASK(static_cast<UChar32>(c));
  return (mask & (U_GC_L_MASK | U_GC_M_MASK | U_GC_ND_MASK | U_GC_NL_MASK | U_GC_PC_MASK)) != 0;
}

char32_t code_point_at(std::string_view text, size_t position) { return next_code_point(text, position); }

bool is_within_word(std::string_view text, size_t begin, size_t end) {
  return (begin > 0 && is_word_character(code_point_at(text, previous_boundary(text, begin)))) ||
         (end < text.size() && is_word_character(code_point_at(text, end)));
}

}  // namespace

void AddedTokens::add(const AddedToken& token) {
  if (token.content.empty() || ids_.contains(token.content)) return;
  const int64_t id = model_.id_of(token.content).value_or(next_id_);
  if (id == next_id_) ++next_id_;
  ids_.emplace(token.content, id);
  entries_.push_back({token, id});
}

void AddedTokens::index() {
  std::vector<std::pair<std::string, int64_t>> as_written, as_normalized;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const AddedToken& token = entries_[i].token;
    const std::string pattern = token.normalized ? model_.normalize(token.content) : token.content;
    if (!pattern.empty())
      (token.normalized ? as_normalized : as_written).emplace_back(pattern, static_cast<int64_t>(i));
  }
  as_written_ = PrefixIndex(std::move(as_written));
  as_normalized_ = PrefixIndex(std::move(as_normalized));
}

std::optional<int64_t> AddedTokens::id_of(std::string_view content) const {
  const auto found = ids_.find(content);
  return found == ids_.end() ? model_.id_of(content) : std::optional(found->second);
}

template <class EncodeRest>
void AddedTokens::split(std::string_view text, const PrefixIndex& patterns, TokenIds& ids,
                        const EncodeRest& encode_rest) const {
  size_t done = 0;  // everything before is encoded
  for (size_t i = 0; i < text.size();) {
    size_t length = 0;
    int64_t found = 0;
    patterns.visit_prefixes(text.substr(i), [&](size_t bytes, int64_t index) {
      if (bytes > length) {
        length = bytes;
        found = index;
      }
    });
    if (length == 0) {
      next_code_point(text, i);
      continue;
    }
    const Entry& entry = entries_[found];
    size_t begin = i, end = i + length;
    i = end;
    if (entry.token.single_word && is_within_word(text, begin, end)) continue;
    if (entry.token.strips_left)
      while (begin > done && is_space(code_point_at(text, previous_boundary(text, begin))))
        begin = previous_boundary(text, begin);
    if (entry.token.strips_right)
      while (end < text.size() && is_space(code_point_at(text, end))) next_code_point(text, end);
    if (begin > done) encode_rest(text.substr(done, begin - done));
    ids.push_back(entry.id);
    done = end;
    i = std::max(i, end);
  }
  if (done < text.size()) encode_rest(text.substr(done));
}

void AddedTokens::encode(std::string_view text, TokenIds& ids) const {
  split(text, as_written_, ids, [&](std::string_view rest) {
    const std::string normalized = model_.normalize(rest);
    split(normalized, as_normalized_, ids, [&](std::string_view plain) { model_.encode(plain, ids); });
  });
}

std::string AddedTokens::description() const {
  std::string text;
  for (const Entry& entry : entries_)
    text += fmt::format("{}:{}{}{}{}:{}\n", entry.id, entry.token.single_word, entry.token.strips_left,
                        entry.token.strips_right, entry.token.normalized, entry.token.content);
  return text;
}

}  // namespace kiln::text
