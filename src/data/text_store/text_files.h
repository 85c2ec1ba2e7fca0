// The safetensors files of a text store: their tensors, checked against text.json.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "checkpoint/safetensors.h"
#include "core/files/xxh3.h"
#include "data/text_store/caption_table.h"
#include "data/text_store/text_store_info.h"

namespace kiln {

std::string captions_path(const std::string& folder);
std::string features_path(const std::string& folder, int64_t shard);
// The entries [first, first + count) of a shard.
struct EntryRange {
  int64_t first = 0, count = 0;
};
EntryRange shard_entries(const TextStoreInfo& info, int64_t shard);

// captions.safetensors: offsets (samples + 1) I64 into entry_of_caption (M) I64, weight (M) F32, kind (M) U8;
// and the text of each entry: text_offsets (entries + 1) I64 into text_bytes U8.
class CaptionsFile {
 public:
  // Throws Error naming the file: a tensor is missing, misaligned, or does not fit `info`.
  CaptionsFile(const std::string& folder, const TextStoreInfo& info);

  struct Range {
    int64_t first, count;
  };
  Range captions(int64_t sample) const { return {offsets_[sample], offsets_[sample + 1] - offsets_[sample]}; }
  std::span<const int64_t> entries, text_offsets;
  std::span<const float> weights;
  std::span<const uint8_t> kinds;
  std::string_view text(int64_t entry) const {
    return {text_ + text_offsets[entry], static_cast<size_t>(text_offsets[entry + 1] - text_offsets[entry])};
  }

 private:
  std::unique_ptr<TensorFile> file_;
  std::span<const int64_t> offsets_;
  const char* text_ = nullptr;
};
void write_captions_file(const std::string& folder, const CaptionTable& table);

// features-NNNNN.safetensors: features (rows, D) of the store's dtype, row_offsets (entries + 1) I64 and,
// except in stores of earlier versions, entry_xxh3 (entries) I64, the checksum of each entry's rows.
class FeaturesFile {
 public:
  // Throws Error as above, and for a file that belongs to other captions or another encoder.
  FeaturesFile(const std::string& folder, const TextStoreInfo& info, int64_t shard);

  int64_t num_rows(int64_t entry_in_shard) const {
    return row_offsets_[entry_in_shard + 1] - row_offsets_[entry_in_shard];
  }
  std::span<const std::byte> rows(int64_t entry_in_shard) const {
    return features_.subspan(row_offsets_[entry_in_shard] * row_bytes_,
                             num_rows(entry_in_shard) * row_bytes_);
  }
  std::span<const std::byte> features() const { return features_; }
  bool has_checksums() const { return !checksums_.empty(); }
  // Compares the rows of an entry with their checksum, if there is one, at the first call for it. Calls
  // `refuse`, which throws, if they have changed. Thread-safe.
  template <class Refuse>
  void check(int64_t entry_in_shard, const Refuse& refuse) const {
    if (!has_checksums()) return;
    first_reads_.once(entry_in_shard, [&] {
      if (static_cast<int64_t>(xxh3(rows(entry_in_shard))) != checksums_[entry_in_shard]) refuse();
    });
  }
  std::string columns_xxh3() const;  // of all columns but the features
  int64_t num_truncated() const { return num_truncated_; }

 private:
  std::unique_ptr<TensorFile> file_;
  std::span<const int64_t> row_offsets_, checksums_;
  std::span<const std::byte> features_;
  FirstReads first_reads_;
  int64_t row_bytes_ = 0, num_truncated_ = 0;
};
// `rows_of_entry` has the number of rows of each entry of the shard, `features` the rows in that order.
void write_features_file(const std::string& folder, const TextStoreInfo& info, int64_t shard,
                         std::span<const int64_t> rows_of_entry, std::span<const std::byte> features,
                         int64_t num_truncated);

}  // namespace kiln
