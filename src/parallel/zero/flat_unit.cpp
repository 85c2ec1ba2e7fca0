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
std::vector<StateTensor> state_tensors(const FlatLayout& layout, const UnitSharding& sharding,
                                       at::ScalarType master_dtype, const std::vector<StateBuffer>& moments,
                                       size_t num_emas) {
  const int64_t shard = shard_elements(layout.size, sharding, layout.alignment),
                size = padded_size(layout.size, sharding, layout.alignment);
  std::vector<StateTensor> tensors = {{.elements = shard, .dtype = master_dtype}};
  for (const StateBuffer& moment : moments)
    tensors.push_back({.elements = size == 0 ? 0 : state_values(moment, layout, size, shard),
                       .dtype = to_scalar_type(moment.dtype)});
  tensors.resize(tensors.size() + num_emas, {.elements = shard});
  return tensors;
}

int64_t bytes_of(const std::vector<StateTensor>& tensors) {
  int64_t bytes = 0;
  for (const StateTensor& tensor : tensors) bytes += tensor.bytes();
  return bytes;
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
  return bytes_of(state_tensors(layout, options.sharding, options.master_dtype, options.moments,
                                static_cast<size_t>(options.num_emas)));
}

FlatUnit::FlatUnit(std::string name, FlatLayout layout, const FlatUnitOptions& options)
    : name_(std::move(name)),
      layout_(std::move(layout)),
      sharding_(options.sharding),
      size_(padded_size(layout_.size, sharding_, layout_.alignment)),
      shard_size_(shard_elements(layout_.size, sharding_, layout_.alignment)),
      shard_offset_(sharding_.zero_stage > 0 ? shard_size_ * sharding_.rank : 0),
      master_dtype_(options.master_dtype),
      moment_buffers_(options.moments),
      num_emas_(static_cast<size_t>(options.num_emas)),
      placement_(options.placement.at_stage(sharding_.zero_stage)),
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
    if (placement_.params == Placement::kDevice) weight_shard = zeros(shard_size_, options.compute_dtype);
    if (placement_.params == Placement::kHost)
      weight_shard = host_zeros(shard_size_, options.compute_dtype, options.device);
    drop_weights_memory();
  }
  if (placement_.params == Placement::kNvme) nvme_weights_ = options.nvme->weights;
  if (placement_.is_on_device() && options.compute_dtype == master_dtype_) master = weight_shard;
  grads = zeros(size_, options.grad_dtype);
  grad_shard = shard_of(grads);
  if (sharding_.zero_stage >= 2) {
    grad_shard = zeros(shard_size_, options.grad_dtype);
    drop_grads_memory();
  }
  if (placement_.optimizer == Placement::kNvme) {
    nvme_state_ = options.nvme->optimizer_state;
    return;
  }
  const auto state_zeros = [&](const StateTensor& tensor) {
    return placement_.optimizer == Placement::kDevice
               ? zeros(tensor.elements, tensor.dtype)
               : host_zeros(tensor.elements, tensor.dtype, options.device);
  };
  const std::vector<StateTensor> state =
      state_tensors(layout_, sharding_, master_dtype_, moment_buffers_, num_emas_);
  if (!master.defined()) master = state_zeros(state[0]);
  for (size_t i = 0; i < moment_buffers_.size(); ++i) moments.push_back(state_zeros(state[1 + i]));
  for (size_t i = 0; i < num_emas_; ++i) emas.push_back(state_zeros(state[1 + moments.size() + i]));
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
  std::vector<at::Tensor> tensors;
  for (const StateTensor& tensor :
       state_tensors(layout_, sharding_, master_dtype_, moment_buffers_, num_emas_))
    tensors.push_back(lease.nvme_->elements()
                          .narrow(0, std::exchange(begin, begin + tensor.bytes()), tensor.bytes())
                          .view(tensor.dtype)
                          .narrow(0, 0, tensor.elements));
  const auto first_ema = tensors.end() - static_cast<std::ptrdiff_t>(num_emas_);
  lease.master = tensors[0];
  lease.moments.assign(tensors.begin() + 1, first_ema);
  lease.emas.assign(first_ema, tensors.end());
  return lease;
}

int64_t FlatUnit::state_bytes() const {
  return bytes_of(state_tensors(layout_, sharding_, master_dtype_, moment_buffers_, num_emas_));
}

std::vector<StateRun> FlatUnit::moment_runs(size_t moment) const {
  return state_runs(moment_buffers_.at(moment), layout_, shard_offset_, shard_offset_ + shard_size_);
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
  if (placement_.params == Placement::kHost) bytes += static_cast<int64_t>(weight_shard.nbytes());
  if (placement_.optimizer != Placement::kHost) return bytes;
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
