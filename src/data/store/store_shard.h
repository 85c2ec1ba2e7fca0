// One shard of a feature store: a safetensors file whose tensors have been checked against store.json.
#pragma once
#include <array>
#include <memory>
#include <string>
#include <string_view>

#include "checkpoint/safetensors.h"
#include "core/files/xxh3.h"
#include "data/store/sample_log.h"
#include "data/store/store_info.h"

namespace kiln {

// Tensors of n samples of one lane: mean and logvar (n, flips, C, h, w) of the store's dtype, class_labels
// (n) I64, for names and captions a ragged pair *_offsets (n + 1) I64 into *_bytes (total) U8; since version
// 2 also sample_xxh3 (n, 2) I64, the checksums of a sample's mean and logvar, and image_hw (n, 2) I64.
class StoreShard {
 public:
  // Throws Error: a tensor is missing, or its shape, type, alignment or content does not fit `info`, or the
  // small columns are not those of `shard`.
  StoreShard(std::unique_ptr<TensorFile> file, const StoreInfo& info, const StoreInfo::Shard& shard,
             const std::string& where);

  int64_t num_samples() const { return num_samples_; }
  enum Part { kMean, kLogvar };
  // Latents of sample `index` of this shard: C * h * w elements of the store's dtype. REQUIRES: the store has
  // that part.
  const std::byte* latents(Part part, int64_t index, int64_t flip) const {
    return parts_[part] + (index * num_flips_ + flip) * latent_bytes_;
  }
  int64_t label(int64_t index) const { return labels_[index]; }
  std::array<int64_t, 2> image_hw(int64_t index) const {
    if (!image_hw_) return {};
    return {image_hw_[2 * index], image_hw_[2 * index + 1]};
  }
  Dtype dtype() const { return dtype_; }  // of mean and logvar
  int64_t latent_elements() const { return latent_elements_; }
  int64_t sample_bytes() const { return num_flips_ * latent_bytes_; }  // of its mean, or of its logvar
  // Compares the bytes of a part of a sample with their checksum, at the first call for that part. Throws
  // Error naming the sample. Thread-safe.
  void check(Part part, int64_t index) const;
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
  std::string columns_xxh3() const;
  std::span<const std::byte> tensor(const std::string& name, Dtype dtype,
                                    const std::vector<int64_t>& shape) const;
  Ragged ragged(const std::string& name) const;

  std::unique_ptr<TensorFile> file_;
  std::string where_;
  Dtype dtype_;
  int64_t num_samples_, num_flips_, latent_elements_, latent_bytes_;
  std::array<const std::byte*, 2> parts_{};
  const int64_t* labels_ = nullptr;
  const int64_t* checksums_ = nullptr;  // null in version 1, as is image_hw_
  const int64_t* image_hw_ = nullptr;
  FirstReads first_reads_;  // of each sample's mean and logvar
  Ragged names_, captions_;
};

// The columns of a shard in memory, in the layout of the file.
struct ShardColumns {
  std::vector<std::byte> mean, logvar;
  std::vector<int64_t> labels, checksums, image_hws;
  std::vector<int64_t> name_offsets{0}, caption_offsets{0};
  std::string names, captions;

  int64_t num_samples() const { return static_cast<int64_t>(labels.size()); }
  // Latents are already in the store's dtype.
  void append(const SampleLog::Record& record);
  void clear();
  std::string columns_xxh3() const;  // of all columns but mean and logvar
  void write(const std::string& path, const StoreInfo& info, const Lane& lane) const;
};

}  // namespace kiln
