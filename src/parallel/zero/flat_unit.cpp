#include "parallel/zero/flat_unit.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "core/aten.h"
#include "core/error.h"
#include "parallel/offload/host_memory.h"

namespace kiln {

namespace {

constexpr int64_t kSlotAlignment = 32;  // elements: 64 bytes of bf16, 128 of f32

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// The layout's size, padded so that the ranks divide it where it is divided.
int64_t padded_size(int64_t layout_size, const UnitSharding& sharding) {
  return round_up(layout_size, kSlotAlignment * (sharding.zero_stage > 0 ? sharding.world_size : 1));
}

// New or no memory under the same StorageImpl, which every view shares. Not resize_bytes: a trace on meta
// would not see it.
void take_memory(const at::Tensor& tensor) {
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(c10::GetAllocator(tensor.device().type())->allocate(storage->nbytes()));
}
void drop_memory(const at::Tensor& tensor) {
  tensor.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(at::DataPtr(nullptr, tensor.device()));
}

}  // namespace

void FlatLayout::add(const std::string& key, const std::vector<int64_t>& shape) {
  int64_t numel = 1;
  for (int64_t extent : shape) numel *= extent;
  slots.push_back({.key = key, .shape = shape, .offset = size, .numel = numel});
  size = round_up(size + numel, kSlotAlignment);
}

int64_t shard_elements(int64_t layout_size, const UnitSharding& sharding) {
  const int64_t size = padded_size(layout_size, sharding);
  return sharding.zero_stage > 0 ? size / sharding.world_size : size;
}

int64_t state_elements(int64_t shard_size, const FlatUnitOptions& options) {
  return shard_size * (1 + options.num_moments + options.num_emas);
}

FlatUnit::FlatUnit(std::string name, FlatLayout layout, const FlatUnitOptions& options)
    : name_(std::move(name)),
      layout_(std::move(layout)),
      sharding_(options.sharding),
      size_(padded_size(layout_.size, sharding_)),
      shard_size_(shard_elements(layout_.size, sharding_)),
      shard_offset_(sharding_.zero_stage > 0 ? shard_size_ * sharding_.rank : 0),
      num_moments_(static_cast<size_t>(options.num_moments)),
      num_emas_(static_cast<size_t>(options.num_emas)),
      placement_(options.placement),
      weight_placement_(sharding_.zero_stage == 3 ? options.weight_placement : Placement::kDevice),
      nvme_unit_(options.nvme_unit) {
  const auto f32 = at::TensorOptions().device(options.device).dtype(at::kFloat);
  const auto zeros = [&](int64_t size, at::ScalarType dtype) { return at::zeros({size}, f32.dtype(dtype)); };
  const auto shard_of = [&](const at::Tensor& whole) {
    return sharding_.zero_stage > 0 ? whole.narrow(0, shard_offset_, shard_size_) : whole;
  };
  compute_weights = zeros(size_, options.compute_dtype);
  weight_shard = shard_of(compute_weights);
  if (sharding_.zero_stage == 3) {
    weight_shard.reset();
    if (weight_placement_ == Placement::kDevice) weight_shard = zeros(shard_size_, options.compute_dtype);
    if (weight_placement_ == Placement::kHost)
      weight_shard = host_zeros(shard_size_, options.compute_dtype, options.device);
    drop_weights_memory();
  }
  if (weight_placement_ == Placement::kNvme) nvme_weights_ = options.nvme->weights;
  const bool on_device = options.placement == Placement::kDevice;
  if (on_device && weight_placement_ == Placement::kDevice && options.compute_dtype == at::kFloat)
    master = weight_shard;
  grads = zeros(size_, options.grad_dtype);
  grad_shard = shard_of(grads);
  if (sharding_.zero_stage >= 2) {
    grad_shard = zeros(shard_size_, options.grad_dtype);
    drop_grads_memory();
  }
  if (options.placement == Placement::kNvme) {
    nvme_state_ = options.nvme->optimizer_state;
    return;
  }
  const auto state_zeros = [&] {
    return on_device ? zeros(shard_size_, at::kFloat) : host_zeros(shard_size_, at::kFloat, options.device);
  };
  if (!master.defined()) master = state_zeros();
  for (size_t i = 0; i < num_moments_; ++i) moments.push_back(state_zeros());
  for (size_t i = 0; i < num_emas_; ++i) emas.push_back(state_zeros());
}

StateLease FlatUnit::lease(Access access) const {
  StateLease lease;
  if (!nvme_state_) {
    lease.master = master;
    lease.moments = moments;
    lease.emas = emas;
    return lease;
  }
  lease.nvme_.emplace(nvme_state_, nvme_unit_, access);
  int64_t begin = 0;
  const auto next = [&] {
    return lease.nvme_->elements().narrow(0, std::exchange(begin, begin + shard_size_), shard_size_);
  };
  lease.master = next();
  for (size_t i = 0; i < num_moments_; ++i) lease.moments.push_back(next());
  for (size_t i = 0; i < num_emas_; ++i) lease.emas.push_back(next());
  return lease;
}

void FlatUnit::prefetch_state() const {
  if (nvme_state_) nvme_state_->prefetch(nvme_unit_);
}

WeightLease FlatUnit::lease_weights(Access access) const {
  WeightLease lease;
  if (nvme_weights_) lease.nvme_.emplace(nvme_weights_, nvme_unit_, access);
  lease.shard = lease.nvme_ ? lease.nvme_->elements() : weight_shard;
  return lease;
}

void FlatUnit::prefetch_weights() const {
  if (nvme_weights_) nvme_weights_->prefetch(nvme_unit_);
}

int64_t FlatUnit::host_bytes() const {
  int64_t bytes = 0;
  if (weight_placement_ == Placement::kHost) bytes += static_cast<int64_t>(weight_shard.nbytes());
  if (placement_ != Placement::kHost) return bytes;
  bytes += static_cast<int64_t>(master.nbytes());
  for (const auto* buffers : {&moments, &emas})
    for (const at::Tensor& buffer : *buffers) bytes += static_cast<int64_t>(buffer.nbytes());
  return bytes;
}

at::Tensor FlatUnit::view(const at::Tensor& buffer, size_t index) const {
  const FlatSlot& slot = layout_.slots.at(index);
  return buffer.narrow(0, slot.offset, slot.numel).view(slot.shape);
}

at::Tensor FlatUnit::leaf(size_t index) const {
  return view(compute_weights, index).detach().set_requires_grad(true);
}

void FlatUnit::write(at::Tensor& buffer, size_t index, const at::Tensor& value) const {
  const FlatSlot& slot = layout_.slots.at(index);
  if (value.sizes() != at::IntArrayRef(slot.shape))
    fail("flat_unit", "{} expects shape [{}], got [{}]", slot.key, fmt::join(slot.shape, ", "),
         fmt::join(value.sizes(), ", "));
  const int64_t offset = buffer.numel() == size_ ? 0 : shard_offset_;
  const int64_t begin = std::max(slot.offset, offset);
  const int64_t end = std::min(slot.offset + slot.numel, offset + buffer.numel());
  if (begin >= end) return;
  at::NoGradGuard no_grad;
  buffer.narrow(0, begin - offset, end - begin)
      .copy_(value.reshape({slot.numel}).narrow(0, begin - slot.offset, end - begin));
}

void FlatUnit::refresh_weight_shard() {
  if (master.defined() && master.is_same(weight_shard)) return;
  WeightLease weights = lease_weights(Access::kOverwrite);
  weights.shard.copy_(lease(Access::kRead).master);
}

void FlatUnit::start_emas() {
  StateLease state = lease(Access::kWrite);
  for (at::Tensor& ema : state.emas) ema.copy_(state.master);
}

void FlatUnit::take_weights_memory() { take_memory(compute_weights); }
void FlatUnit::drop_weights_memory() { drop_memory(compute_weights); }
void FlatUnit::drop_grads_memory() { drop_memory(grads); }

void FlatUnit::take_grads_memory() {
  take_memory(grads);
  int64_t end = 0;
  for (const FlatSlot& slot : layout_.slots) {
    if (slot.offset > end) grads.narrow(0, end, slot.offset - end).zero_();
    end = slot.offset + slot.numel;
  }
  if (size_ > end) grads.narrow(0, end, size_ - end).zero_();
}

}  // namespace kiln
