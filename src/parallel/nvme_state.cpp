#include "parallel/nvme_state.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <stdexcept>

#include "parallel/host_memory.h"

namespace kiln {

namespace {

constexpr int64_t kElementBytes = 4, kAlignedElements = BlockStore::kAlignment / kElementBytes;

}  // namespace

NvmeState::NvmeState(const std::vector<int64_t>& unit_elements, const BlockStoreOptions& options,
                     at::Device device) {
  int64_t largest = 0;
  for (const int64_t elements : unit_elements) {
    const int64_t blocks = (elements + kAlignedElements - 1) / kAlignedElements;
    places_.push_back(
        {.offset = disk_bytes_, .bytes = blocks * BlockStore::kAlignment, .elements = elements});
    disk_bytes_ += places_.back().bytes;
    largest = std::max(largest, blocks * kAlignedElements);
  }
  if (!device.is_meta()) store_ = std::make_unique<BlockStore>(disk_bytes_, options);
  for (Buffer& buffer : buffers_) {
    buffer.memory = host_zeros(largest + kAlignedElements, at::kFloat, device);
    const auto address = device.is_meta() ? 0 : reinterpret_cast<uintptr_t>(buffer.memory.data_ptr());
    const auto misaligned = static_cast<int64_t>(address / kElementBytes % kAlignedElements);
    buffer.elements = buffer.memory.narrow(0, (kAlignedElements - misaligned) % kAlignedElements, largest);
  }
}

std::span<std::byte> NvmeState::bytes_of(const Buffer& buffer) const {
  return {static_cast<std::byte*>(buffer.elements.data_ptr()),
          static_cast<size_t>(places_[static_cast<size_t>(buffer.unit)].bytes)};
}

// The buffer that holds the unit or is about to. The least recently used one goes to a new unit.
NvmeState::Buffer& NvmeState::buffer_with(size_t unit) {
  Buffer* found = nullptr;
  for (Buffer& buffer : buffers_) {
    if (buffer.unit == static_cast<int64_t>(unit)) return buffer;
    if (buffer.users == 0 && (!found || buffer.last_use < found->last_use)) found = &buffer;
  }
  if (!found) throw std::logic_error("nvme state: more units are in use than there are buffers");
  found->transfer.wait();
  found->unit = static_cast<int64_t>(unit);
  if (store_) found->transfer = store_->read(bytes_of(*found), places_[unit].offset);
  return *found;
}

void NvmeState::prefetch(size_t unit) { buffer_with(unit).last_use = ++uses_; }

at::Tensor NvmeState::acquire(size_t unit) {
  Buffer& buffer = buffer_with(unit);
  buffer.last_use = ++uses_;
  try {
    buffer.transfer.wait();
  } catch (...) {
    buffer.unit = -1;  // what it holds is not the unit's state
    throw;
  }
  ++buffer.users;
  return buffer.elements.narrow(0, 0, places_[unit].elements);
}

void NvmeState::release(size_t unit, bool changed) {
  Buffer& buffer = buffer_with(unit);
  buffer.changed = buffer.changed || changed;
  if (--buffer.users > 0 || !std::exchange(buffer.changed, false)) return;
  if (store_) buffer.transfer = store_->write(bytes_of(buffer), places_[unit].offset);
}

std::vector<at::Tensor> NvmeState::buffers() const {
  std::vector<at::Tensor> memory;
  for (const Buffer& buffer : buffers_) memory.push_back(buffer.memory);
  return memory;
}

}  // namespace kiln
