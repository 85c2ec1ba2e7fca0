#include "models/features/picture_input.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "core/aten.h"
#include "core/error.h"

namespace kiln {
namespace {

// For one axis of the output: the two inputs around each position, and the share of the second.
struct Neighbours {
  at::Tensor low, high, share;

  Neighbours(int64_t in, int64_t out, at::Device device) {
    // The scale is rounded to f32 before it is used, as in TensorFlow.
    const at::Tensor positions =
        at::arange(out, at::TensorOptions(at::kFloat)) *
        at::full({}, static_cast<double>(in) / static_cast<double>(out), at::TensorOptions(at::kFloat));
    low = positions.to(at::kLong);
    share = (positions - low.to(at::kFloat)).to(device);
    high = (low + 1).clamp_max(in - 1).to(device);
    low = low.to(device);
  }
};

constexpr double kPillowOne = 1 << 22;  // 1 in Pillow's fixed point

// Returns (out, in) f64: the share of each input in each output by Pillow's cubic (a = -0.5), which widens
// where the picture shrinks. Shares are whole multiples of 1 / kPillowOne, times kPillowOne, as in Pillow.
at::Tensor pillow_weights(int64_t in, int64_t out) {
  constexpr double kA = -0.5, kReach = 2;
  const auto cubic = [](double x) {
    x = std::abs(x);
    if (x < 1) return ((kA + 2) * x - (kA + 3)) * x * x + 1;
    return x < kReach ? (((x - 5) * x + 8) * x - 4) * kA : 0.0;
  };
  const double scale = static_cast<double>(in) / static_cast<double>(out), stretch = std::max(scale, 1.0);
  const double reach = kReach * stretch;
  at::Tensor weights = at::zeros({out, in}, at::TensorOptions(at::kDouble));
  for (int64_t i = 0; i < out; ++i) {
    const double centre = (static_cast<double>(i) + 0.5) * scale;
    const auto first = std::max<int64_t>(static_cast<int64_t>(centre - reach + 0.5), 0);
    const auto last = std::min(static_cast<int64_t>(centre + reach + 0.5), in);
    double* row = weights.mutable_data_ptr<double>() + i * in;
    double sum = 0;
    for (int64_t j = first; j < last; ++j)
      sum += row[j] = cubic((static_cast<double>(j) - centre + 0.5) / stretch);
    for (int64_t j = first; j < last; ++j) row[j] = std::round(row[j] / sum * kPillowOne);
  }
  return weights;
}

}  // namespace

void check_pictures(std::string_view who, const at::Tensor& pictures) {
  if (pictures.scalar_type() != at::kByte || pictures.dim() != 4 || pictures.size(1) != 3 ||
      pictures.numel() == 0)
    fail(who, "expected pictures (B, 3, H, W) of U8, got ({}) of {}", fmt::join(pictures.sizes(), ", "),
         c10::toString(pictures.scalar_type()));
}

at::Tensor resize_like_tensorflow1(const at::Tensor& values, int64_t side) {
  const Neighbours columns(values.size(3), side, values.device()),
      rows(values.size(2), side, values.device());
  // Blends columns in every row of the input first, then rows.
  const at::Tensor left = values.index_select(3, columns.low), right = values.index_select(3, columns.high);
  const at::Tensor blended = left + (right - left) * columns.share;
  const at::Tensor top = blended.index_select(2, rows.low), bottom = blended.index_select(2, rows.high);
  return top + (bottom - top) * rows.share.unsqueeze(1);
}

at::Tensor resize_like_pillow(const at::Tensor& values, int64_t side) {
  // Resizes the width, then the height, and rounds to 8 bits after each, as Pillow does. Skips a side that
  // keeps its length.
  const auto resized = [&](const at::Tensor& from) {  // resizes the last dimension
    if (from.size(3) == side) return from;
    const at::Tensor weights = pillow_weights(from.size(3), side).to(from.device());
    // f64 sums whole numbers below 2^53 exactly.
    const at::Tensor sums = from.to(at::kDouble).matmul(weights.t());
    return ((sums + kPillowOne / 2) / kPillowOne).floor().clamp(0, 255).to(from.scalar_type());
  };
  return resized(resized(values).transpose(2, 3)).transpose(2, 3).contiguous();
}

}  // namespace kiln
