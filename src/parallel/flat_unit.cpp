#include "parallel/flat_unit.h"

#include <ATen/ATen.h>

#include <fmt/ranges.h>

#include "core/error.h"

namespace kiln {

namespace {

constexpr int64_t kSlotAlignment = 32;  // elements: 64 bytes of bf16, 128 of f32

int64_t round_up(int64_t n) { return (n + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment; }

}  // namespace

void FlatLayout::add(const std::string& key, const std::vector<int64_t>& shape) {
  int64_t numel = 1;
  for (int64_t extent : shape) numel *= extent;
  slots.push_back({.key = key, .shape = shape, .offset = size, .numel = numel});
  size = round_up(size + numel);
}

FlatUnit::FlatUnit(std::string name, FlatLayout layout, const FlatUnitOptions& options)
    : name_(std::move(name)), layout_(std::move(layout)) {
  const auto f32 = at::TensorOptions().device(options.device).dtype(at::kFloat);
  master = at::zeros({layout_.size}, f32);
  compute_weights = options.compute_dtype == at::kFloat
                        ? master
                        : at::zeros({layout_.size}, f32.dtype(options.compute_dtype));
  grads = at::zeros({layout_.size}, f32.dtype(options.grad_dtype));
  for (int64_t i = 0; i < options.num_moments; ++i) moments.push_back(at::zeros({layout_.size}, f32));
  for (int64_t i = 0; i < options.num_emas; ++i) emas.push_back(at::zeros({layout_.size}, f32));
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
  at::NoGradGuard no_grad;
  view(buffer, index).copy_(value);
}

void FlatUnit::refresh_compute_weights() {
  if (!compute_weights.is_same(master)) compute_weights.copy_(master);
}

void FlatUnit::start_emas() {
  for (at::Tensor& ema : emas) ema.copy_(master);
}

}  // namespace kiln
