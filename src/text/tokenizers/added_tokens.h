// Tokens that are found in the text as they stand, before the vocabulary cuts the rest.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizers/prefix_index.h"
#include "text/tokenizers/subword_model.h"

namespace kiln::text {

struct AddedToken {
  std::string content{};
  bool single_word = false;                        // not within a word
  bool strips_left = false, strips_right = false;  // also takes the spaces beside it
  bool normalized = false;                         // found in normalized text, and normalized itself
};

class AddedTokens {
 public:
  explicit AddedTokens(const SubwordModel& model) : model_(model), next_id_(model.vocabulary_size()) {}

  // Adds a token. One that the vocabulary has keeps its id, any other gets the next id. Ignores an empty
  // token and a second one with the same content.
  void add(const AddedToken& token);
  // Call this after the last add().
  void index();

  // Returns the id of a token, added or of the vocabulary.
  std::optional<int64_t> id_of(std::string_view content) const;
  int64_t vocabulary_size() const { return next_id_; }
  // Appends the ids of a text. The model encodes what lies between added tokens.
  void encode(std::string_view text, TokenIds& ids) const;
  // Returns everything that decides the ids, for a fingerprint.
  std::string description() const;

 private:
  struct Entry {
    AddedToken token;
    int64_t id = 0;
  };
  // Appends the ids of tokens of `patterns`, and calls encode_rest(text) for everything between them.
  template <class EncodeRest>
  void split(std::string_view text, const PrefixIndex& patterns, TokenIds& ids,
             const EncodeRest& encode_rest) const;

  const SubwordModel& model_;
  std::vector<Entry> entries_;
  std::map<std::string, int64_t, std::less<>> ids_;
  int64_t next_id_;
  PrefixIndex as_written_, as_normalized_;  // of indices into entries_
};

}  // namespace kiln::text
