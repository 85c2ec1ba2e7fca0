#include "nn/embeddings.h"

#include <cmath>

#include "core/aten.h"

namespace kiln::nn {

at::Tensor timestep_embedding(const at::Tensor& timesteps, int64_t width) {
  const int64_t half = width / 2;
  const at::Tensor exponents = at::arange(half, timesteps.options().dtype(at::kFloat)) * (-std::log(10000.0));
  const at::Tensor frequencies = at::exp(exponents / static_cast<double>(half));
  const at::Tensor angles = timesteps.to(at::kFloat).unsqueeze(1) * frequencies;  // (B, half)
  return at::cat({at::cos(angles), at::sin(angles)}, 1);
}

at::Tensor sincos_position_table(int64_t width, int64_t grid_h, int64_t grid_w) {
  const int64_t quarter = width / 4;
  at::Tensor table = at::empty({1, grid_h * grid_w, width}, at::kFloat);
  float* out = table.mutable_data_ptr<float>();
  for (int64_t row = 0; row < grid_h; ++row) {
    for (int64_t column = 0; column < grid_w; ++column, out += width) {
      for (int64_t i = 0; i < quarter; ++i) {
        const double frequency = std::pow(10000.0, -static_cast<double>(i) / static_cast<double>(quarter));
        out[i] = static_cast<float>(std::sin(column * frequency));
        out[quarter + i] = static_cast<float>(std::cos(column * frequency));
        out[2 * quarter + i] = static_cast<float>(std::sin(row * frequency));
        out[3 * quarter + i] = static_cast<float>(std::cos(row * frequency));
      }
    }
  }
  return table;
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
