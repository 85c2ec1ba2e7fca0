// What autoencoders do between their convolutions, each in one pass where a CPU computes no gradient; else in
// ATen's operations, and recorded as those.
#include <fmt/ranges.h>

#include "core/aten.h"
#include "core/error.h"
#include "core/tensors.h"
#include "ops/cpu/kernels.h"
#include "ops/kernels.h"
#include "ops/op_mark.h"
#include "ops/ops.h"

namespace kiln::ops {
namespace {

constexpr int64_t kPieceElements = 16384;

bool is_one_pass(const at::Tensor& x) {
  return has_cpu_kernel(x) && x.numel() > 0 && !(at::GradMode::is_enabled() && x.requires_grad());
}

// (B, C, H, W) channels-last and (B, H, W, C) are the same memory.
at::Tensor rows_of(const at::Tensor& x) { return x.permute({0, 2, 3, 1}); }
at::Tensor features_of(const at::Tensor& rows) { return rows.permute({0, 3, 1, 2}); }

// Calls body(row of `small`, the two rows of `large` at its place). small (B, h, w, C), large (B, 2 h, 2 w,
// C').
template <class Body>
void for_each_row(const at::Tensor& small, const at::Tensor& large, const Body& body) {
  kLoop.on(small)(small.size(0) * small.size(1), 1, [&](int64_t begin, int64_t end) {
    const int64_t small_bytes = small.size(2) * small.size(3) * small.element_size(),
                  large_bytes = large.size(2) * large.size(3) * large.element_size();
    for (int64_t i = begin; i < end; ++i) {
      char* two_rows = static_cast<char*>(large.data_ptr()) + 2 * i * large_bytes;
      body(static_cast<char*>(small.data_ptr()) + i * small_bytes, two_rows, two_rows + large_bytes);
    }
  });
}

// rows (..., 2 C) -> (..., C), the means of two neighbours.
at::Tensor halved_by_means(const at::Tensor& rows) {
  OpMark mark("kiln::mean_of_pairs", rows);
  std::vector<int64_t> sizes = rows.sizes().vec();
  sizes.back() /= 2;
  const at::Tensor halved = at::empty(sizes, rows.options());
  kLoop.on(rows)(halved.numel(), kPieceElements, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * rows.element_size();
    cpu::mean_of_pairs(from_scalar_type(rows.scalar_type()),
                       static_cast<const char*>(rows.const_data_ptr()) + 2 * first,
                       static_cast<char*>(halved.data_ptr()) + first, end - begin);
  });
  mark.outputs(halved);
  return halved;
}

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                    double eps) {
  if (x.dim() < 1 || weight.numel() != x.size(-1) || (bias && bias->numel() != x.size(-1)))
    fail("rms_norm", "expected x (..., D), weight and bias (D), got {}, {} and {}", fmt::join(x.sizes(), "x"),
         fmt::join(weight.sizes(), "x"), bias ? fmt::format("{}", fmt::join(bias->sizes(), "x")) : "no bias");
  const bool is_trained =
      at::GradMode::is_enabled() && (weight.requires_grad() || (bias && bias->requires_grad()));
  if (is_trained || !is_one_pass(x)) return reference::rms_norm(x, weight, bias, eps);
  OpMark mark("kiln::rms_norm", x, weight, bias.value_or(at::Tensor()));
  const at::Tensor rows = x.contiguous(), out = at::empty_like(rows);
  const at::Tensor wide_weight = weight.to(at::kFloat).contiguous(),
                   wide_bias = bias ? bias->to(at::kFloat).contiguous() : at::Tensor();
  const int64_t width = x.size(-1), num_rows = x.numel() / width;
  kLoop.on(x)(num_rows, std::max<int64_t>(kPieceElements / width, 1), [&](int64_t begin, int64_t end) {
    const cpu::RmsNormRows norm{.dtype = from_scalar_type(x.scalar_type()),
                                .width = static_cast<size_t>(width),
                                .weight = wide_weight.const_data_ptr<float>(),
                                .bias = bias ? wide_bias.const_data_ptr<float>() : nullptr,
                                .eps = static_cast<float>(eps)};
    const int64_t first = begin * width * x.element_size();
    cpu::rms_norm(norm, static_cast<const char*>(rows.const_data_ptr()) + first,
                  static_cast<char*>(out.data_ptr()) + first, end - begin);
  });
  mark.outputs(out);
  return out;
}

at::Tensor silu(const at::Tensor& x) {
  if (!is_one_pass(x) || !x.is_non_overlapping_and_dense()) return at::silu(x);
  OpMark mark("kiln::silu", x);
  const at::Tensor out = at::empty_like(x);
  kLoop.on(x)(x.numel(), kPieceElements, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * x.element_size();
    cpu::silu(from_scalar_type(x.scalar_type()), static_cast<const char*>(x.const_data_ptr()) + first,
              static_cast<char*>(out.data_ptr()) + first, end - begin);
  });
  mark.outputs(out);
  return out;
}

at::Tensor pixels_to_channels(const at::Tensor& x) {
  if (x.dim() != 4 || x.size(2) % 2 != 0 || x.size(3) % 2 != 0)
    fail("pixels_to_channels", "expected x (B, C, H, W) of even sides, got {}", fmt::join(x.sizes(), "x"));
  if (!is_one_pass(x)) return reference::pixels_to_channels(x);
  OpMark mark("kiln::pixels_to_channels", x);
  const at::Tensor large = rows_of(x).contiguous();
  const at::Tensor small =
      at::empty({large.size(0), large.size(1) / 2, large.size(2) / 2, 4 * large.size(3)}, x.options());
  for_each_row(small, large, [&](char* to, char* top, char* bottom) {
    cpu::pixels_to_channels(from_scalar_type(x.scalar_type()), top, bottom, to, small.size(2), large.size(3));
  });
  mark.outputs(small);
  return features_of(small);
}

at::Tensor channels_to_pixels(const at::Tensor& x, int64_t repeats) {
  if (x.dim() != 4 || repeats < 1 || x.size(1) * repeats % 4 != 0)
    fail("channels_to_pixels", "expected x (B, 4 C / {}, H, W), got {}", repeats, fmt::join(x.sizes(), "x"));
  if (!is_one_pass(x) || 4 % repeats != 0) return reference::channels_to_pixels(x, repeats);
  OpMark mark("kiln::channels_to_pixels", x);
  const at::Tensor small = rows_of(x).contiguous();
  const at::Tensor large = at::empty(
      {small.size(0), 2 * small.size(1), 2 * small.size(2), small.size(3) * repeats / 4}, x.options());
  for_each_row(small, large, [&](char* from, char* top, char* bottom) {
    cpu::channels_to_pixels(from_scalar_type(x.scalar_type()), from, top, bottom, small.size(2),
                            large.size(3), repeats);
  });
  mark.outputs(large);
  return features_of(large);
}

at::Tensor mean_of_channels(const at::Tensor& x, int64_t groups) {
  if (x.dim() != 4 || groups < 1 || x.size(1) % groups != 0)
    fail("mean_of_channels", "expected x (B, C, H, W) with C a multiple of {}, got {}", groups,
         fmt::join(x.sizes(), "x"));
  at::Tensor rows = rows_of(x);
  if (is_one_pass(x)) {
    rows = rows.contiguous();
    int64_t size = x.size(1) / groups;
    if (size > 2) rows = rows.to(at::kFloat);  // rounded once, at the end
    for (; size % 2 == 0; size /= 2) rows = halved_by_means(rows);
  }
  if (rows.size(3) > groups) rows = rows.unflatten(3, {groups, -1}).mean(-1);
  return features_of(rows.to(x.scalar_type()));
}

namespace reference {

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                    double eps) {
  const at::ScalarType math = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor rows = x.to(math);
  const at::Tensor length = at::linalg_vector_norm(rows, 2, at::IntArrayRef{-1}, /*keepdim=*/true),
                   normed = rows * (length.square() / rows.size(-1) + eps).rsqrt();
  const at::Tensor weighted = normed * weight.to(math);
  return (bias ? weighted + bias->to(math) : weighted).to(x.scalar_type());
}

at::Tensor pixels_to_channels(const at::Tensor& x) {
  const at::Tensor rows = rows_of(x).unflatten(2, {-1, 2}).unflatten(1, {-1, 2});  // (B, h, 2, w, 2, C)
  return features_of(rows.permute({0, 1, 3, 5, 2, 4}).flatten(3));
}

at::Tensor channels_to_pixels(const at::Tensor& x, int64_t repeats) {
  const at::Tensor all = repeats == 1 ? x : at::repeat_interleave(x, repeats, 1);
  const at::Tensor rows = rows_of(all).unflatten(3, {-1, 2, 2});  // (B, h, w, C, 2, 2)
  return features_of(rows.permute({0, 1, 4, 2, 5, 3}).flatten(3, 4).flatten(1, 2));
}

}  // namespace reference
}  // namespace kiln::ops
