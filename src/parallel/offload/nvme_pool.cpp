#include "parallel/offload/nvme_pool.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "core/aten.h"
#include "core/tensors.h"
#include "parallel/offload/host_memory.h"

namespace kiln {

namespace {

int64_t elements_per_block(at::ScalarType dtype) {
  return BlockStore::kAlignment / static_cast<int64_t>(c10::elementSize(dtype));
}

int64_t blocks_of(int64_t elements, at::ScalarType dtype) {
  return (elements + elements_per_block(dtype) - 1) / elements_per_block(dtype);
}

}  // namespace

int64_t NvmeUnits::disk_bytes() const {
  int64_t blocks = 0;
  for (const int64_t count : elements) blocks += blocks_of(count, dtype);
  return blocks * BlockStore::kAlignment;
}

NvmePool::NvmePool(const NvmeUnits& units, std::shared_ptr<BlockStore> store, int64_t offset,
                   at::Device device)
    : store_(std::move(store)), buffers_(units.num_buffers) {
  const int64_t aligned_elements = elements_per_block(units.dtype);
  int64_t largest = 0;
  for (const int64_t elements : units.elements) {
    const int64_t blocks = blocks_of(elements, units.dtype);
    places_.push_back({.offset = offset, .bytes = blocks * BlockStore::kAlignment, .elements = elements});
    offset += places_.back().bytes;
    largest = std::max(largest, blocks * aligned_elements);
  }
  for (Buffer& buffer : buffers_) {
    buffer.memory = host_zeros(largest + aligned_elements, units.dtype, device);
    const auto address = reinterpret_cast<uintptr_t>(buffer.memory.data_ptr());
    const auto past = static_cast<int64_t>(address % BlockStore::kAlignment / c10::elementSize(units.dtype));
    buffer.elements = buffer.memory.narrow(0, (aligned_elements - past) % aligned_elements, largest);
  }
}

std::span<std::byte> NvmePool::bytes_of(const Buffer& buffer) const {
  return {static_cast<std::byte*>(buffer.elements.data_ptr()),
          static_cast<size_t>(places_[static_cast<size_t>(buffer.unit)].bytes)};
}

// Returns the buffer that holds the unit or is about to. A new unit gets the least recently used one.
NvmePool::Buffer& NvmePool::buffer_with(size_t unit, bool reads) {
  Buffer* found = nullptr;
  for (Buffer& buffer : buffers_) {
    if (buffer.unit == static_cast<int64_t>(unit)) return buffer;
    if (buffer.users == 0 && (!found || buffer.last_use < found->last_use)) found = &buffer;
  }
  if (!found) throw std::logic_error("nvme pool: more units are in use than there are buffers");
  found->transfer.wait();
  found->unit = static_cast<int64_t>(unit);
  if (store_ && reads) found->transfer = store_->read(bytes_of(*found), places_[unit].offset);
  return *found;
}

void NvmePool::prefetch(size_t unit) { buffer_with(unit, /*reads=*/true).last_use = ++uses_; }

at::Tensor NvmePool::acquire(size_t unit, Access access) {
  Buffer& buffer = buffer_with(unit, /*reads=*/access != Access::kOverwrite);
  buffer.last_use = ++uses_;
  try {
    buffer.transfer.wait();
  } catch (...) {
    buffer.unit = -1;  // what it holds is not the unit
    throw;
  }
  ++buffer.users;
  return buffer.elements.narrow(0, 0, places_[unit].elements);
}

void NvmePool::release(size_t unit, Access access) {
  Buffer& buffer = buffer_with(unit, /*reads=*/true);
  buffer.changed = buffer.changed || access != Access::kRead;
  if (--buffer.users > 0 || !std::exchange(buffer.changed, false)) return;
  if (store_) buffer.transfer = store_->write(bytes_of(buffer), places_[unit].offset);
}

std::vector<at::Tensor> NvmePool::buffers() const {
  std::vector<at::Tensor> memory;
  for (const Buffer& buffer : buffers_) memory.push_back(buffer.memory);
  return memory;
}

NvmeState::NvmeState(const NvmeUnits& optimizer_state_units, const NvmeUnits& weight_units,
                     const BlockStoreOptions& options, at::Device device)
    : disk_bytes_(optimizer_state_units.disk_bytes() + weight_units.disk_bytes()) {
  if (has_values(device)) store_ = std::make_shared<BlockStore>(disk_bytes_, options);
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
