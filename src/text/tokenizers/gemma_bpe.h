// SentencePiece's byte-pair encoding with bytes for unknown characters, as Gemma uses it.
#pragma once
#include <memory>
#include <string>

#include "text/tokenizers/sentencepiece_model.h"
#include "text/tokenizers/subword_model.h"

namespace kiln::text {

// Spaces become marks; nothing else is normalized. `unknown` is the token of characters that have no byte
// tokens either. Throws Error naming `source` when there is no such token.
std::unique_ptr<SubwordModel> make_gemma_bpe(const SentencePieceModel& model, const std::string& unknown,
                                             const std::string& source);

}  // namespace kiln::text
