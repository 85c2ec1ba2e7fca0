// One shard of a feature store: a safetensors file whose tensors have been checked against store.json.
#pragma once
#include <memory>
#include <string>
#include <string_view>

#include "checkpoint/safetensors.h"
#include "data/feature_store.h"

namespace kiln {

// Tensors of n samples: mean and logvar (n, flips, C, h, w) of the store's dtype, class_labels (n) I64, and
// for names and captions a ragged pair: *_offsets (n + 1) I64 into *_bytes (total) U8.
class StoreShard {
 public:
  // Throws Error: a tensor is missing, or its shape, type, alignment or content does not fit `info`.
  StoreShard(std::unique_ptr<TensorFile> file, const StoreInfo& info, int64_t num_samples,
             const std::string& where);

  int64_t num_samples() const { return num_samples_; }
  // Latents of sample `index` of this shard: C * h * w elements of the store's dtype.
  const std::byte* mean(int64_t index, int64_t flip) const { return mean_ + latent_offset(index, flip); }
  const std::byte* logvar(int64_t index, int64_t flip) const { return logvar_ + latent_offset(index, flip); }
  int64_t label(int64_t index) const { return labels_[index]; }
  std::string_view name(int64_t index) const { return names_.at(index); }
  std::string_view caption(int64_t index) const { return captions_.at(index); }

 private:
  struct Ragged {
    const int64_t* offsets = nullptr;
    const char* bytes = nullptr;
    std::string_view at(int64_t index) const {
      return {bytes + offsets[index], static_cast<size_t>(offsets[index + 1] - offsets[index])};
    }
  };
  int64_t latent_offset(int64_t index, int64_t flip) const {
    return (index * num_flips_ + flip) * latent_bytes_;
  }
  std::span<const std::byte> tensor(const std::string& name, Dtype dtype,
                                    const std::vector<int64_t>& shape) const;
  Ragged ragged(const std::string& name) const;

  std::unique_ptr<TensorFile> file_;
  std::string where_;
  int64_t num_samples_, num_flips_, latent_bytes_;
  const std::byte* mean_ = nullptr;
  const std::byte* logvar_ = nullptr;
  const int64_t* labels_ = nullptr;
  Ragged names_, captions_;
};

// The columns of a shard in memory, in the layout of the file.
struct ShardColumns {
  std::vector<std::byte> mean, logvar;
  std::vector<int64_t> labels;
  std::vector<int64_t> name_offsets{0}, caption_offsets{0};
  std::string names, captions;

  int64_t num_samples() const { return static_cast<int64_t>(labels.size()); }
  // Latents are already in the store's dtype.
  void append(std::span<const std::byte> mean_bytes, std::span<const std::byte> logvar_bytes, int64_t label,
              std::string_view name, std::string_view caption);
  void clear();
  void write(const std::string& path, const StoreInfo& info) const;
};

}  // namespace kiln
