#include "text/tokenizers/tokenizer.h"

#include <algorithm>

#include "core/error.h"
#include "text/tokenizers/unicode.h"

namespace kiln::text {
namespace {

int64_t size_of(const TokenIds& ids) { return static_cast<int64_t>(ids.size()); }

void shorten(TokenIds& ids, int64_t length) {
  if (size_of(ids) > length) ids.resize(length);
}

// Cuts two texts to `room` ids together: the longer one first, and both to half of `room` if that is not
// enough.
void shorten_pair(TokenIds& a, TokenIds& b, int64_t room) {
  if (size_of(a) + size_of(b) <= room) return;
  const bool a_is_shorter = size_of(a) <= size_of(b);
  int64_t shorter = std::min(size_of(a), size_of(b));
  int64_t longer = shorter > room ? shorter : std::max(shorter, room - shorter);
  if (shorter + longer > room) {
    shorter = room / 2;
    longer = shorter + room % 2;
  }
  shorten(a, a_is_shorter ? shorter : longer);
  shorten(b, a_is_shorter ? longer : shorter);
}

int64_t room_for_text(const TokenizeOptions& options, int64_t num_special) {
  const int64_t room = *options.max_length - (options.add_special_tokens ? num_special : 0);
  if (room < 0)
    fail("tokenizer", "a max_length of {} does not hold the {} special tokens", *options.max_length,
         num_special);
  return room;
}

void append(TokenIds& ids, const TokenIds& more) { ids.insert(ids.end(), more.begin(), more.end()); }

}  // namespace

TokenIds Tokenizer::encode(std::string_view text, const TokenizeOptions& options) const {
  check_utf8(text);
  TokenIds ids;
  tokens_->encode(text, ids);
  if (options.max_length)
    shorten(ids, room_for_text(options, size_of(frame_.before) + size_of(frame_.after)));
  if (!options.add_special_tokens) return ids;
  TokenIds framed = frame_.before;
  append(framed, ids);
  append(framed, frame_.after);
  return framed;
}

TokenIds Tokenizer::encode(std::string_view text, std::string_view pair,
                           const TokenizeOptions& options) const {
  check_utf8(text);
  check_utf8(pair);
  TokenIds first, second;
  tokens_->encode(text, first);
  tokens_->encode(pair, second);
  if (options.max_length)
    shorten_pair(
        first, second,
        room_for_text(options, size_of(frame_.before) + size_of(frame_.between) + size_of(frame_.after)));
  TokenIds framed;
  if (options.add_special_tokens) append(framed, frame_.before);
  append(framed, first);
  if (options.add_special_tokens) append(framed, frame_.between);
  append(framed, second);
  if (options.add_special_tokens) append(framed, frame_.after);
  return framed;
}

}  // namespace kiln::text
