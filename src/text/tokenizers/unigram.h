// SentencePiece's unigram language model (Kudo 2018), as T5 uses it.
#pragma once
#include <memory>
#include <string>

#include "text/tokenizers/sentencepiece_model.h"
#include "text/tokenizers/subword_model.h"

namespace kiln::text {

// `num_extra_ids` sentinels follow the pieces, <extra_id_0> as the last one. `source` is named in errors. The
// pieces are those of transformers (words, scores summed in f64); the normalization is SentencePiece's own.
std::unique_ptr<SubwordModel> make_t5_unigram(const SentencePieceModel& model, int64_t num_extra_ids,
                                              const std::string& source);

}  // namespace kiln::text
