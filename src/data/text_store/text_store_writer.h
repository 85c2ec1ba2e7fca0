// Writes a text store shard by shard, in any order and by several processes. Torch-free.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "core/files/file_lock.h"
#include "data/text_store/caption_table.h"
#include "data/text_store/text_files.h"
#include "data/text_store/text_store_info.h"

namespace kiln {

class TextStoreWriter {
 public:
  // `info` describes the encoder; its counts are set from `table`. Creates the folder, or continues what an
  // interrupted run of the same settings left there. Throws Error naming the differences if the folder holds
  // a store of another encoder, other settings or other captions, or if another process is writing it. Only
  // other ranks of that process may: they `join` after it.
  TextStoreWriter(std::string folder, TextStoreInfo info, const CaptionTable& table, bool joins = false);

  const TextStoreInfo& info() const { return info_; }
  bool is_complete() const { return is_complete_; }  // already before this run
  // True if a shard exists, is whole and belongs to this store.
  bool has_shard(int64_t shard) const;
  // Writes a shard atomically. `rows_of_entry` has the number of rows of each of its entries, `features`
  // these rows in order, in info().dtype.
  void write_shard(int64_t shard, std::span<const int64_t> rows_of_entry, std::span<const std::byte> features,
                   int64_t num_truncated);
  // Writes the captions and marks the store complete. Call it when all shards exist. Throws Error naming a
  // missing shard.
  void finish(const CaptionTable& table);

 private:
  void write_info() const;
  std::string folder_;
  std::unique_ptr<FileLock> lock_;  // null if it joins
  TextStoreInfo info_;
  bool is_complete_ = false;
};

}  // namespace kiln
