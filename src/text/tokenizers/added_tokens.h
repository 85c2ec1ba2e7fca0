// Tokens that are recognised in the text as they stand, before the vocabulary's own way of cutting it.
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
  bool strips_left = false, strips_right = false;  // takes the spaces beside it along
  bool normalized = false;                         // found in normalized text, and normalized itself
};

class AddedTokens {
 public:
  explicit AddedTokens(const SubwordModel& model) : model_(model), next_id_(model.vocabulary_size()) {}

  // A token that the vocabulary has keeps its id, another gets the next one. The first of the same content
  // counts; an empty one does not.
  void add(const AddedToken& token);
  // After the last add().
  void index();

  // The id of a token, added or of the vocabulary.
  std::optional<int64_t> id_of(std::string_view content) const;
  int64_t vocabulary_size() const { return next_id_; }
  // Ids of a text; what lies between added tokens is the model's.
  void encode(std::string_view text, TokenIds& ids) const;
  // Everything that decides about ids, for a fingerprint.
  std::string description() const;

 private:
  struct Entry {
    AddedToken token;
    int64_t id = 0;
  };
  // encode_rest(text) for what is no token of `patterns`, ids for what is.
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
