// The part of the training state that is on a disk, brought into memory unit by unit.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/files/block_store.h"

namespace kiln {

// What a pool keeps of each unit.
struct NvmeUnits {
  std::vector<int64_t> elements{};  // by unit
  at::ScalarType dtype = at::kFloat;
  size_t num_buffers = 3;  // one is read while one is used and one is written

  int64_t disk_bytes() const;  // each unit begins on a boundary of the store
};

enum class Access {
  kRead,
  kWrite,      // reads and changes
  kOverwrite,  // replaces all of it: what was there is not read
};

// A part of a store, and buffers of the largest unit's size. A unit that is still in a buffer is not read
// again. Not thread-safe.
class NvmePool {
 public:
  // The pool owns units.disk_bytes() bytes of `store`, from `offset` on. `store` is null in a dry run on
  // meta, which only has the buffers.
  NvmePool(const NvmeUnits& units, std::shared_ptr<BlockStore> store, int64_t offset, at::Device device);
  NvmePool(const NvmePool&) = delete;

  // Begins to read a unit that acquire() will be called for. REQUIRES: a buffer is free.
  void prefetch(size_t unit);
  // Returns the unit's elements. They stay in memory until release() was called as often as acquire(). Throws
  // Error if the disk failed, now or in an earlier write. REQUIRES: no more units are acquired at once than
  // there are buffers.
  at::Tensor acquire(size_t unit, Access access);
  // Begins to write the unit if it was acquired for writing and nobody else holds it.
  void release(size_t unit, Access access);

  std::vector<at::Tensor> buffers() const;

 private:
  struct Place {  // where a unit is on the disk
    int64_t offset = 0, bytes = 0, elements = 0;
  };
  struct Buffer {
    at::Tensor memory, elements;  // elements: from an aligned address on
    int64_t unit = -1;            // the unit that it holds; -1: none
    int64_t users = 0, last_use = 0;
    bool changed = false;
    BlockTransfer transfer;  // the last one, from or to the disk
  };
  std::span<std::byte> bytes_of(const Buffer& buffer) const;
  Buffer& buffer_with(size_t unit, bool reads);

  std::shared_ptr<BlockStore> store_;
  std::vector<Place> places_;
  int64_t uses_ = 0;
  std::vector<Buffer> buffers_;
};

// Holds a unit's elements in memory while it lives.
class NvmeLease {
 public:
  NvmeLease(std::shared_ptr<NvmePool> pool, size_t unit, Access access)
      : pool_(std::move(pool)), unit_(unit), access_(access), elements_(pool_->acquire(unit, access)) {}
  NvmeLease(NvmeLease&&) noexcept = default;
  ~NvmeLease() {
    if (pool_) pool_->release(unit_, access_);
  }
  const at::Tensor& elements() const { return elements_; }

 private:
  std::shared_ptr<NvmePool> pool_;  // null: moved from
  size_t unit_ = 0;
  Access access_{};
  at::Tensor elements_;
};

// What a rank keeps on a disk: one file, and the buffers in memory that its units pass through.
class NvmeState {
 public:
  // Takes all the space on the disk, which starts as zeros. A pool without units is null. On meta (a dry run)
  // there are only the buffers. Throws Error if the folder does not exist or the disk is full.
  NvmeState(const NvmeUnits& optimizer_state, const NvmeUnits& weights, const BlockStoreOptions& options,
            at::Device device);
  NvmeState(const NvmeState&) = delete;

  // Null: not on the disk.
  std::shared_ptr<NvmePool> optimizer_state, weights;

  std::vector<at::Tensor> buffers() const;  // of both pools
  int64_t disk_bytes() const { return disk_bytes_; }
  const BlockStore* store() const { return store_.get(); }  // null on meta

 private:
  int64_t disk_bytes_ = 0;
  std::shared_ptr<BlockStore> store_;
};

}  // namespace kiln
