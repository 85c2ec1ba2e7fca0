// Training state of units on a disk, brought into memory unit by unit.
#pragma once
#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/block_store.h"

namespace kiln {

// Three buffers of the largest unit's size: one is read while one is used and one is written. A unit that is
// still in a buffer is not read again. For one thread.
class NvmeState {
 public:
  // unit_elements: f32 elements of each unit's state, zeros at the start. Takes all the space on the disk.
  // On meta (a dry run) there are only the buffers. Throws Error.
  NvmeState(const std::vector<int64_t>& unit_elements, const BlockStoreOptions& options, at::Device device);
  NvmeState(const NvmeState&) = delete;

  // Begins to read a unit that acquire() will be called for. REQUIRES: fewer than two units are acquired.
  void prefetch(size_t unit);
  // The unit's elements (unit_elements) in memory until release(), as often as it was acquired. Throws Error:
  // the disk failed, now or in an earlier write. REQUIRES: at most three units are acquired at once.
  at::Tensor acquire(size_t unit);
  void release(size_t unit, bool changed);  // changed: begins to write it when nobody else has it

  std::vector<at::Tensor> buffers() const;
  int64_t disk_bytes() const { return disk_bytes_; }
  const BlockStore* store() const { return store_.get(); }  // null on meta

 private:
  struct Place {  // of a unit on the disk
    int64_t offset = 0, bytes = 0, elements = 0;
  };
  struct Buffer {
    at::Tensor memory, elements;  // elements: f32, from an aligned address on
    int64_t unit = -1;            // whose state it holds
    int64_t users = 0, last_use = 0;
    bool changed = false;
    BlockTransfer transfer;  // the last: from or to the disk
  };
  std::span<std::byte> bytes_of(const Buffer& buffer) const;
  Buffer& buffer_with(size_t unit);

  std::vector<Place> places_;
  int64_t disk_bytes_ = 0, uses_ = 0;
  std::unique_ptr<BlockStore> store_;
  std::array<Buffer, 3> buffers_;
};

}  // namespace kiln
