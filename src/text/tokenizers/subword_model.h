// The interface of a kind of tokenizer that turns plain text into ids. The Tokenizer adds what surrounds the
// text.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kiln::text {

using TokenIds = std::vector<int64_t>;

class SubwordModel {
 public:
  virtual ~SubwordModel() = default;
  // Returns valid UTF-8 in the form that the vocabulary was made for: lower case, without accents, composed,
  // ...
  virtual std::string normalize(std::string_view text) const = 0;
  // Appends the ids of normalized text between added tokens.
  virtual void encode(std::string_view normalized, TokenIds& ids) const = 0;
  virtual std::optional<int64_t> id_of(std::string_view token) const = 0;
  virtual int64_t vocabulary_size() const = 0;
};

}  // namespace kiln::text
