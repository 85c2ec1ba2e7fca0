#include "parallel/flat_unit.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "core/error.h"

namespace kiln {

namespace {

constexpr int64_t kSlotAlignment = 32;  // elements: 64 bytes of bf16, 128 of f32

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

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

FlatUnit::FlatUnit(std::string name, FlatLayout layout, const FlatUnitOptions& options)
    : name_(std::move(name)), layout_(std::move(layout)), sharding_(options.sharding) {
  const bool divided = sharding_.zero_stage > 0;
  size_ = round_up(layout_.size, kSlotAlignment * (divided ? sharding_.world_size : 1));
  shard_size_ = divided ? size_ / sharding_.world_size : size_;
  shard_offset_ = divided ? shard_size_ * sharding_.rank : 0;

  const auto f32 = at::TensorOptions().device(options.device).dtype(at::kFloat);
  const auto zeros = [&](int64_t size, at::ScalarType dtype) { return at::zeros({size}, f32.dtype(dtype)); };
  const auto shard_of = [&](const at::Tensor& whole) {
    return divided ? whole.narrow(0, shard_offset_, shard_size_) : whole;
  };
  compute_weights = zeros(size_, options.compute_dtype);
  weight_shard = shard_of(compute_weights);
  if (sharding_.zero_stage == 3) {
    weight_shard = zeros(shard_size_, options.compute_dtype);
    drop_weights_memory();
  }
  master = options.compute_dtype == at::kFloat ? weight_shard : zeros(shard_size_, at::kFloat);
  grads = zeros(size_, options.grad_dtype);
  grad_shard = shard_of(grads);
  if (sharding_.zero_stage >= 2) {
    grad_shard = zeros(shard_size_, options.grad_dtype);
    drop_grads_memory();
  }
  for (int64_t i = 0; i < options.num_moments; ++i) moments.push_back(zeros(shard_size_, at::kFloat));
  for (int64_t i = 0; i < options.num_emas; ++i) emas.push_back(zeros(shard_size_, at::kFloat));
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
  if (!weight_shard.is_same(master)) weight_shard.copy_(master);
}

void FlatUnit::start_emas() {
  for (at::Tensor& ema : emas) ema.copy_(master);
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
