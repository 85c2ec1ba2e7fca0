// The JSON files beside a vocabulary: which tokens are special, which are added, and on which side one pads.
#pragma once
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "core/json.h"
#include "text/tokenizers/added_tokens.h"

namespace kiln::text {

// Special tokens by their role: "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
// "mask_token".
using TokenRoles = std::map<std::string, std::string>;

struct TokenizerConfig {
  TokenRoles roles{};
  std::vector<AddedToken> added{};  // in the order in which they get their ids
  // True if tokenizer_config.json has a list of further special tokens, which then are the only ones.
  bool lists_special_tokens = false;
  nlohmann::json settings{};  // tokenizer_config.json, {} without one
};

// Reads tokenizer_config.json and, unless that lists the added tokens itself, special_tokens_map.json and
// added_tokens.json; then the added tokens of tokenizer.json. `defaults` are the roles of the kind of
// tokenizer. `has_own_tokens`: the vocabulary's file names special tokens, so the additional ones of
// special_tokens_map.json do not count. Throws Error naming the file.
TokenizerConfig read_tokenizer_config(const std::filesystem::path& folder, const TokenRoles& defaults,
                                      bool has_own_tokens);

}  // namespace kiln::text
