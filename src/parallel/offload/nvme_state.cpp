#include "parallel/offload/nvme_state.h"

namespace kiln {

NvmeState::NvmeState(const NvmeUnits& optimizer_state_units, const NvmeUnits& weight_units,
                     const BlockStoreOptions& options, at::Device device)
    : disk_bytes_(optimizer_state_units.disk_bytes() + weight_units.disk_bytes()) {
  if (!device.is_meta()) store_ = std::make_shared<BlockStore>(disk_bytes_, options);
  const auto pool_of = [&](const NvmeUnits& units, int64_t offset) {
    return units.elements.empty() ? nullptr : std::make_shared<NvmePool>(units, store_, offset, device);
  };
  optimizer_state = pool_of(optimizer_state_units, 0);
  weights = pool_of(weight_units, optimizer_state_units.disk_bytes());
}

std::vector<at::Tensor> NvmeState::buffers() const {
  std::vector<at::Tensor> memory;
  for (const auto& pool : {optimizer_state, weights})
    if (pool)
      for (const at::Tensor& buffer : pool->buffers()) memory.push_back(buffer);
  return memory;
}

}  // namespace kiln
