// CLIP's byte-level byte-pair encoding (Radford et al. 2021): vocab.json, merges.txt, words that end in </w>.
#pragma once
#include <filesystem>
#include <memory>
#include <string>

#include "text/tokenizers/subword_model.h"

namespace kiln::text {

// Throws Error when a file is missing or broken, or when the vocabulary lacks a merged token or `unknown`.
std::unique_ptr<SubwordModel> load_clip_bpe(const std::filesystem::path& vocabulary,
                                            const std::filesystem::path& merges, const std::string& unknown);

}  // namespace kiln::text
