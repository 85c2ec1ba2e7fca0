// What of a rank's training state is on a disk: one file, and the buffers in memory that its units pass
// through.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "parallel/offload/nvme_pool.h"

namespace kiln {

class NvmeState {
 public:
  // Takes all the space on the disk; zeros at the start. Without elements of any unit a pool is null. On meta
  // (a dry run) there are only the buffers. Throws Error: no such folder, disk full.
  NvmeState(const NvmeUnits& optimizer_state, const NvmeUnits& weights, const BlockStoreOptions& options,
            at::Device device);
  NvmeState(const NvmeState&) = delete;

  // Null: not on the disk.
  std::shared_ptr<NvmePool> optimizer_state, weights;

  std::vector<at::Tensor> buffers() const;  // of both
  int64_t disk_bytes() const { return disk_bytes_; }
  const BlockStore* store() const { return store_.get(); }  // null on meta

 private:
  int64_t disk_bytes_ = 0;
  std::shared_ptr<BlockStore> store_;
};

}  // namespace kiln
