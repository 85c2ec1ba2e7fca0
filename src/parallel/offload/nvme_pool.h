// Tensors of units on a disk, brought into memory unit by unit.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/files/block_store.h"

namespace kiln {

// What is kept of each unit.
struct NvmeUnits {
  std::vector<int64_t> elements{};  // by unit
  at::ScalarType dtype = at::kFloat;
  size_t num_buffers = 3;  // one is read while one is used and one is written

  int64_t disk_bytes() const;  // each unit begins on a boundary of the store
};

enum class Access {
  kRead,
  kWrite,      // reads and changes
  kOverwrite,  // all of it: what was there is not read
};

// A part of a store, and buffers of the largest unit's size. A unit that is still in a buffer is not read
// again. For one thread.
class NvmePool {
 public:
  // store: from `offset` on, units.disk_bytes() of it are the pool's; null in a dry run on meta, which has
  // the buffers only.
  NvmePool(const NvmeUnits& units, std::shared_ptr<BlockStore> store, int64_t offset, at::Device device);
  NvmePool(const NvmePool&) = delete;

  // Begins to read a unit that acquire() will be called for. REQUIRES: a buffer is free.
  void prefetch(size_t unit);
  // The unit's elements in memory until release(), as often as it was acquired. Throws Error: the disk
  // failed, now or in an earlier write. REQUIRES: no more units are acquired at once than there are buffers.
  at::Tensor acquire(size_t unit, Access access);
  // Begins to write what was acquired for writing when nobody else has it.
  void release(size_t unit, Access access);

  std::vector<at::Tensor> buffers() const;

 private:
  struct Place {  // of a unit on the disk
    int64_t offset = 0, bytes = 0, elements = 0;
  };
  struct Buffer {
    at::Tensor memory, elements;  // elements: from an aligned address on
    int64_t unit = -1;            // whose it holds
    int64_t users = 0, last_use = 0;
    bool changed = false;
    BlockTransfer transfer;  // the last: from or to the disk
  };
  std::span<std::byte> bytes_of(const Buffer& buffer) const;
  Buffer& buffer_with(size_t unit, bool reads);

  std::shared_ptr<BlockStore> store_;
  std::vector<Place> places_;
  int64_t uses_ = 0;
  std::vector<Buffer> buffers_;
};

// A unit's elements in memory while this lives.
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

}  // namespace kiln
