// Imports the caption features that PixArt's tools/extract_features.py has cached, as the text store of an
// imported feature store.
#pragma once
#include <string>

namespace kiln {

struct PixartCaptionOptions {
  std::string features;      // folder of .npz files: caption_feature (1, L, D), attention_mask (1, L)
  std::string data_info;     // data_info.json: the prompts
  std::string text_encoder;  // folder of the encoder that they were made with; "": not at hand
  std::string name = "t5";   // of the text store
};

// REQUIRES: `store` is what import_store() made with the same data_info. Keeps the rows that the mask marks.
// Without the encoder the store has no features of the empty caption, and prompts are not checked against its
// fingerprint. Throws Error naming a sample without features, or what is wrong with a file.
void import_pixart_captions(const std::string& store, const PixartCaptionOptions& options);

}  // namespace kiln
