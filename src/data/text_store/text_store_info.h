// The description of a text store (text.json), and its folder. Torch-free.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"

namespace kiln {

// The content of text.json, which a reader must check before it trains on the features.
struct TextStoreInfo {
  std::string encoder;  // "t5_encoder", "bert", ... (models/text/text_registry.h)
  std::string encoder_fingerprint, tokenizer_fingerprint;
  std::string encoder_path;  // a hint; equal stores may differ in it
  int64_t width = 0;         // D of the features
  int64_t max_tokens = 0;    // the most rows of a caption
  bool padded = false;       // every caption has max_tokens rows, padding included (CLIP)
  Dtype dtype = Dtype::kF16;
  std::string prefix, suffix;  // around every caption but the empty one
  std::string instruction;     // the encoder saw it before every caption but the empty one; it has no rows
  std::string compute_dtype;   // of the encoder
  std::string captions_fingerprint;  // of the samples' names and captions
  int64_t num_samples = 0;           // of the feature store
  int64_t num_entries = 0;           // distinct captions; the first is the empty one
  int64_t entries_per_shard = 0;     // the last shard may have fewer
  int64_t num_truncated = 0;         // entries that were longer than max_tokens
  int64_t num_without_caption = 0;   // samples without one
  std::vector<std::string> kinds;    // of captions
  std::string samples_xxh3;          // of the samples' names; "" in a store of an earlier version
  // Each features file has one, of 16 hexadecimal digits. Empty while the store is incomplete.
  std::vector<std::string> shards_xxh3;
  // They cover the columns of each features file that are no features, their checksums among them. Empty in a
  // store of an earlier version, whose features cannot be checked where they are read.
  std::vector<std::string> columns_xxh3;
  std::string captions_xxh3;  // of captions.safetensors
  bool complete = false;

  int64_t num_shards() const { return (num_entries + entries_per_shard - 1) / entries_per_shard; }
};

// Parses text.json and checks every field. `where` names the text in messages. Throws Error.
TextStoreInfo parse_text_store_info(std::string_view text, const std::string& where);
TextStoreInfo read_text_store_info(const std::string& folder);
std::string text_store_info_text(const TextStoreInfo& info);
// Returns the names of the text stores in a feature store's folder, sorted. The name of "text-t5" is "t5".
std::vector<std::string> find_text_stores(const std::string& feature_store);
std::string text_store_folder(const std::string& feature_store, const std::string& name);

}  // namespace kiln
