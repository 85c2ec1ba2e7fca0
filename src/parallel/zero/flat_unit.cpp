#include "parallel/zero/flat_unit.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "core/aten.h"
#include "core/error.h"
#include "core/tensors.h"
#include "parallel/offload/host_memory.h"

namespace kiln {

namespace {

constexpr int64_t kStateAlignment = 64;  // bytes

// Returns the layout's size, padded so that the ranks can divide it evenly if it is divided.
int64_t padded_size(int64_t layout_size, const UnitSharding& sharding, int64_t alignment) {
  return round_up(layout_size, alignment * (sharding.zero_stage > 0 ? sharding.world_size : 1));
}

// A tensor of a unit's optimizer state.
struct StateTensor {
  int64_t elements = 0;
  at::ScalarType dtype = at::kFloat;

  int64_t bytes() const {
    return round_up(elements * static_cast<int64_t>(c10::elementSize(dtype)), kStateAlignment);
  }
};

// Lists master, moments and EMAs, in this order.
std::vector<StateTensor> state_tensors(const FlatLayout& layout, const FlatUnitOptions& options) {
  const int64_t shard = shard_elements(layout.size, options.sharding, layout.alignment),
                size = padded_size(layout.size, options.sharding, layout.alignment);
  std::vector<StateTensor> tensors = {{.elements = shard, .dtype = options.master_dtype}};
  for (const StateBuffer& moment : options.moments)
    tensors.push_back({.elements = size == 0 ? 0 : state_values(moment, layout, size, shard),
                       .dtype = to_scalar_type(moment.dtype)});
  tensors.resize(tensors.size() + static_cast<size_t>(options.num_emas), {.elements = shard});
  return tensors;
}

// These give a tensor new memory or none, under the same StorageImpl, which every view shares. They do not
// use resize_bytes, which a trace on meta would not see.
void take_memory(const at::Tensor& tensor) {
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(c10::GetAllocator(tensor.device().type())->allocate(storage->nbytes()));
}
void drop_memory(const at::Tensor& tensor) {
  tensor.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(at::DataPtr(nullptr, tensor.device()));
}

}  // namespace

int64_t shard_elements(int64_t layout_size, const UnitSharding& sharding, int64_t alignment) {
  const int64_t size = padded_size(layout_size, sharding, alignment);
  return sharding.zero_stage > 0 ? size / sharding.world_size : size;
}

int64_t state_bytes(const FlatLayout& layout, const FlatUnitOptions& options) {
  int64_t bytes = 0;
  for (const StateTensor& tensor : state_tensors(layout, options)) bytes += tensor.bytes();
  return bytes;
}

FlatUnit::FlatUnit(std::string name, FlatLayout layout, const FlatUnitOptions& options)
    : name_(std::move(name)),
      layout_(std::move(layout)),
      options_(options),
      size_(padded_size(layout_.size, options.sharding, layout_.alignment)),
      shard_size_(shard_elements(layout_.size, options.sharding, layout_.alignment)),
      shard_offset_(options.sharding.zero_stage > 0 ? shard_size_ * options.sharding.rank : 0) {
  const int64_t stage = options.sharding.zero_stage;
  options_.placement = options.placement.at_stage(stage);
  const auto f32 = at::TensorOptions().device(options.device).dtype(at::kFloat);
  const auto zeros = [&](int64_t size, at::ScalarType dtype) { return at::zeros({size}, f32.dtype(dtype)); };
  const auto shard_of = [&](const at::Tensor& whole) {
    return stage > 0 ? whole.narrow(0, shard_offset_, shard_size_) : whole;
  };
  compute_weights = zeros(size_, options.compute_dtype);
  weight_shard = shard_of(compute_weights);
  if (stage == 3) {
    weight_shard.reset();
    if (placement().params == Placement::kDevice) weight_shard = zeros(shard_size_, options.compute_dtype);
    if (placement().params == Placement::kHost)
      weight_shard = host_zeros(shard_size_, options.compute_dtype, options.device);
    drop_weights_memory();
  }
  if (placement().is_on_device() && options.compute_dtype == options.master_dtype) master = weight_shard;
  grads = zeros(size_, options.grad_dtype);
  grad_shard = shard_of(grads);
  if (stage >= 2) {
    grad_shard = zeros(shard_size_, options.grad_dtype);
    drop_grads_memory();
  }
  if (placement().optimizer == Placement::kNvme) return;
  const auto state_zeros = [&](const StateTensor& tensor) {
    return placement().optimizer == Placement::kDevice
               ? zeros(tensor.elements, tensor.dtype)
               : host_zeros(tensor.elements, tensor.dtype, options.device);
  };
  const std::vector<StateTensor> state = state_tensors(layout_, options_);
  if (!master.defined()) master = state_zeros(state[0]);
  for (size_t i = 1; i < state.size(); ++i)
    (i <= options.moments.size() ? moments : emas).push_back(state_zeros(state[i]));
}

StateLease FlatUnit::lease(Access access) const {
  StateLease lease;
  if (placement().optimizer != Placement::kNvme) {
    lease.master = master;
    lease.moments = moments;
    lease.emas = emas;
    return lease;
  }
  lease.nvme_.emplace(options_.nvme->optimizer_state, options_.nvme_unit, access);
  int64_t begin = 0;
  std::vector<at::Tensor> tensors;
  for (const StateTensor& tensor : state_tensors(layout_, options_))
    tensors.push_back(lease.nvme_->elements()
                          .narrow(0, std::exchange(begin, begin + tensor.bytes()), tensor.bytes())
                          .view(tensor.dtype)
                          .narrow(0, 0, tensor.elements));
  const auto first_ema = tensors.end() - options_.num_emas;
  lease.master = tensors[0];
  lease.moments.assign(tensors.begin() + 1, first_ema);
  lease.emas.assign(first_ema, tensors.end());
  return lease;
}

std::vector<StateRun> FlatUnit::moment_runs(size_t moment) const {
  return state_runs(options_.moments.at(moment), layout_, shard_offset_, shard_offset_ + shard_size_);
}

void FlatUnit::write_moment(const StateLease& lease, size_t moment, size_t index,
                            const at::Tensor& values) const {
  const StateRun run = moment_runs(moment)[index];
  if (run.count == 0) return;
  at::NoGradGuard no_grad;
  at::Tensor buffer = lease.moments.at(moment);
  buffer.narrow(0, run.place, run.count).copy_(values.reshape({-1}).narrow(0, run.first, run.count));
}

void FlatUnit::prefetch_state() const {
  if (placement().optimizer == Placement::kNvme) options_.nvme->optimizer_state->prefetch(options_.nvme_unit);
}

WeightLease FlatUnit::lease_weights(Access access) const {
  WeightLease lease;
  if (placement().params == Placement::kNvme)
    lease.nvme_.emplace(options_.nvme->weights, options_.nvme_unit, access);
  lease.shard = lease.nvme_ ? lease.nvme_->elements() : weight_shard;
  return lease;
}

void FlatUnit::prefetch_weights() const {
  if (placement().params == Placement::kNvme) options_.nvme->weights->prefetch(options_.nvme_unit);
}

int64_t FlatUnit::host_bytes() const {
  int64_t bytes = 0;
  if (placement().params == Placement::kHost) bytes += static_cast<int64_t>(weight_shard.nbytes());
  if (placement().optimizer != Placement::kHost) return bytes;
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
  if (begin >= end || !has_values(buffer)) return;  // a plan makes the state of every number of ranks
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
