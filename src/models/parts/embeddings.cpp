#include "models/parts/embeddings.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/aten.h"

namespace kiln::nn {
namespace {

// Returns [sin | cos] of `count` scaled coordinates, (count, width) f32. Computes on the device, because a
// copy from the host would wait for the device's queue and cannot be recorded into a graph.
at::Tensor axis_table(int64_t width, int64_t count, int64_t base_size, double interpolation,
                      at::Device device) {
  const int64_t half = width / 2;
  const double stretch = static_cast<double>(count) / static_cast<double>(base_size);
  const auto f64 = at::TensorOptions(device).dtype(at::kDouble);
  const at::Tensor coordinates =
      at::arange(count, f64.dtype(at::kFloat)).div_(stretch).div_(interpolation).to(at::kDouble);
  const at::Tensor frequencies =
      at::exp(at::arange(half, f64).mul_(-std::log(10000.0) / static_cast<double>(half)));
  const at::Tensor angles = coordinates.unsqueeze(1) * frequencies;  // (count, half)
  return at::cat({at::sin(angles), at::cos(angles)}, 1).to(at::kFloat);
}

}  // namespace

at::Tensor timestep_embedding(const at::Tensor& timesteps, int64_t width, bool cos_first,
                              double frequency_shift) {
  const int64_t half = width / 2;
  const at::Tensor exponents = at::arange(half, timesteps.options().dtype(at::kFloat)) * (-std::log(10000.0));
  const at::Tensor frequencies = at::exp(exponents / (static_cast<double>(half) - frequency_shift));
  const at::Tensor angles = timesteps.to(at::kFloat).unsqueeze(1) * frequencies;  // (B, half)
  return cos_first ? at::cat({at::cos(angles), at::sin(angles)}, 1)
                   : at::cat({at::sin(angles), at::cos(angles)}, 1);
}

at::Tensor sincos_position_table(int64_t width, int64_t grid_h, int64_t grid_w) {
  const int64_t quarter = width / 4;
  at::Tensor table = at::empty({1, grid_h * grid_w, width}, at::kFloat);
  float* out = table.mutable_data_ptr<float>();
  // Sines, then cosines, of each place along a side.
  std::vector<float> of_place(static_cast<size_t>(std::max(grid_h, grid_w) * 2 * quarter));
  for (int64_t i = 0; i < quarter; ++i) {
    const double frequency = std::pow(10000.0, -static_cast<double>(i) / static_cast<double>(quarter));
    for (int64_t place = 0; place < std::max(grid_h, grid_w); ++place) {
      float* pair = of_place.data() + place * 2 * quarter;
      pair[i] = static_cast<float>(std::sin(static_cast<double>(place) * frequency));
      pair[quarter + i] = static_cast<float>(std::cos(static_cast<double>(place) * frequency));
    }
  }
  for (int64_t row = 0; row < grid_h; ++row)
    for (int64_t column = 0; column < grid_w; ++column)
      for (const int64_t place : {column, row})
        out = std::copy_n(of_place.data() + place * 2 * quarter, 2 * quarter, out);
  return table;
}

at::Tensor scaled_position_table(int64_t width, int64_t grid_h, int64_t grid_w, int64_t base_size,
                                 double interpolation, at::Device device) {
  const int64_t half = width / 2;
  const at::Tensor columns = axis_table(half, grid_w, base_size, interpolation, device);
  const at::Tensor rows = axis_table(half, grid_h, base_size, interpolation, device);
  return at::cat({columns.unsqueeze(0).expand({grid_h, grid_w, half}),
                  rows.unsqueeze(1).expand({grid_h, grid_w, half})},
                 -1)
      .view({1, grid_h * grid_w, width});
}

at::Tensor patchify(const at::Tensor& x, int64_t patch_size) {
  const int64_t p = patch_size, grid_h = x.size(2) / p, grid_w = x.size(3) / p;
  return x.reshape({x.size(0), x.size(1), grid_h, p, grid_w, p})
      .permute({0, 2, 4, 1, 3, 5})  // (B, h, w, C, p, p)
      .reshape({x.size(0), grid_h * grid_w, x.size(1) * p * p});
}

at::Tensor unpatchify(const at::Tensor& tokens, int64_t patch_size, int64_t grid_h, int64_t grid_w) {
  const int64_t p = patch_size, channels = tokens.size(2) / (p * p);
  return tokens.reshape({tokens.size(0), grid_h, grid_w, p, p, channels})
      .permute({0, 5, 1, 3, 2, 4})  // (B, C, h, p, w, p)
      .reshape({tokens.size(0), channels, grid_h * p, grid_w * p});
}

}  // namespace kiln::nn
