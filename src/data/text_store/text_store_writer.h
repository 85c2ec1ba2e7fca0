// Writing a text store, shard by shard, in any order and by several processes. Torch-free.
#pragma once
#include <cstdint>
#include <span>
#include <string>

#include "data/text_store/caption_table.h"
#include "data/text_store/text_files.h"
#include "data/text_store/text_store_info.h"

namespace kiln {

class TextStoreWriter {
 public:
  // `info`: what is known of the encoder; the counts are set from `table`. Creates the folder, or goes on
  // with what an interrupted run of the same settings left there. Throws Error naming what differs where the
  // folder holds a store of another encoder, other settings or other captions.
  TextStoreWriter(std::string folder, TextStoreInfo info, const CaptionTable& table);

  const TextStoreInfo& info() const { return info_; }
  bool is_complete() const { return is_complete_; }  // before this run
  // Whether a shard is there, whole and of this store.
  bool has_shard(int64_t shard) const;
  // Rows of each of its entries, and these rows of info().dtype in their order. Atomic.
  void write_shard(int64_t shard, std::span<const int64_t> rows_of_entry, std::span<const std::byte> features,
                   int64_t num_truncated);
  // Once all shards are there: writes the captions and marks the store complete. Throws Error naming a
  // missing shard.
  void finish(const CaptionTable& table);

 private:
  void write_info() const;
  std::string folder_;
  TextStoreInfo info_;
  bool is_complete_ = false;
};

}  // namespace kiln
