// Small feature stores for tests, their contents a function of the sample.
#pragma once
#include <cmath>
#include <string>
#include <vector>

#include "data/store/feature_store.h"
#include "data/text_store/text_store_info.h"
#include "test_files.h"

namespace kiln::test {

inline StoreInfo small_info() {
  StoreInfo info;
  info.autoencoder = "autoencoder_kl";
  info.autoencoder_fingerprint = "0123456789abcdef";
  info.scaling_factor = 0.18215;
  info.channels = 2;
  info.lanes = {{.height = 3, .width = 5}};
  info.image_size = 40;
  info.class_names = {"cat", "dog", "newt"};
  info.source = {{"path", "pictures"}};
  return info;
}

// Of a text encoder that nobody has.
inline TextStoreInfo small_text_info(int64_t width, int64_t max_tokens, int64_t entries_per_shard,
                                     Dtype dtype = Dtype::kF32) {
  TextStoreInfo info;
  info.encoder = "bert";
  info.encoder_fingerprint = "xxh3:1";
  info.tokenizer_fingerprint = "xxh3:2";
  info.width = width;
  info.max_tokens = max_tokens;
  info.dtype = dtype;
  info.compute_dtype = "f32";
  info.entries_per_shard = entries_per_shard;
  return info;
}

inline float mean_value(int64_t sample, int64_t element) {
  return static_cast<float>(sample) + static_cast<float>(element) / 256;
}
inline float logvar_value(int64_t sample, int64_t element) {
  return -2 - static_cast<float>(sample % 7) - static_cast<float>(element) / 256;
}

inline FeatureStoreWriter::Sample make_sample(const StoreInfo& info, int64_t index) {
  FeatureStoreWriter::Sample sample;
  sample.name = "folder/image." + std::to_string(index) + ".v2.png";
  if (index % 3 != 0)
    sample.caption = std::string(index % 17, 'a') + " \xc3\xa9 caption " + std::to_string(index);
  sample.label = info.class_names.empty() ? -1 : index % static_cast<int64_t>(info.class_names.size());
  const int64_t size = info.num_flips * info.latent_size();
  for (int64_t e = 0; e < size; ++e) {
    sample.mean.push_back(mean_value(index, e));
    if (info.has_logvar) sample.logvar.push_back(logvar_value(index, e));
  }
  return sample;
}

// Writes samples from num_complete() to num_samples.
inline void add_samples(FeatureStoreWriter& writer, const StoreInfo& info, int64_t num_samples) {
  for (int64_t i = writer.num_complete(); i < num_samples; ++i) writer.add(make_sample(info, i));
}

inline void write_store(const std::string& folder, const StoreInfo& info, int64_t num_samples,
                        int64_t samples_per_shard = 4) {
  const auto writer = FeatureStoreWriter::open(folder, info, samples_per_shard);
  add_samples(*writer, info, num_samples);
  writer->finish();
}

}  // namespace kiln::test
