#include "models/features/picture_input.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "core/aten.h"
#include "core/error.h"

namespace kiln {
namespace {

// Holds, for one axis of the output, the two inputs around each position and the share of the second.
struct Neighbours {
  at::Tensor low, high, share;

  Neighbours(int64_t in, int64_t out, at::Device device) {
    // The scale is rounded to f32 before it is used, as there.
    const at::Tensor positions =
        at::arange(out, at::TensorOptions(at::kFloat)) *
        at::full({}, static_cast<double>(in) / static_cast<double>(out), at::TensorOptions(at::kFloat));
    low = positions.to(at::kLong);
    share = (positions - low.to(at::kFloat)).to(device);
    high = (low + 1).clamp_max(in - 1).to(device);
    low = low.to(device);
  }
};

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
  // Columns are blended once for every row of the input, then rows.
  const at::Tensor left = values.index_select(3, columns.low), right = values.index_select(3, columns.high);
  const at::Tensor blended = left + (right - left) * columns.share;
  const at::Tensor top = blended.index_select(2, rows.low), bottom = blended.index_select(2, rows.high);
  return top + (bottom - top) * rows.share.unsqueeze(1);
}

at::Tensor resize_like_pillow(const at::Tensor& values, int64_t side) {
  if (values.size(2) == side && values.size(3) == side) return values;
  return at::_upsample_bicubic2d_aa(values, {side, side}, /*align_corners=*/false).clamp(0, 255);
}

}  // namespace kiln
