// WordPiece as BERT uses it (Devlin et al. 2019; Wu et al. 2016): vocab.txt, greedy longest match.
#pragma once
#include <filesystem>
#include <memory>
#include <string>

#include "text/tokenizers/subword_model.h"

namespace kiln::text {

struct WordPieceOptions {
  bool lower_case = true;
  bool strip_accents = true;
  bool separate_ideographs = true;
  std::string unknown = "[UNK]";
};

// `vocabulary`: a token per line, ids by line. Throws Error when the file or the unknown token is missing.
std::unique_ptr<SubwordModel> load_wordpiece(const std::filesystem::path& vocabulary,
                                             const WordPieceOptions& options);

}  // namespace kiln::text
