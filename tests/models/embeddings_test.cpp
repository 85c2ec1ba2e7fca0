#include "models/parts/embeddings.h"
#include "core/aten.h"

#include <gtest/gtest.h>

#include <cmath>

namespace kiln::nn {
namespace {

TEST(TimestepEmbedding, IsCosinesThenSinesOfGeometricFrequencies) {
  const at::Tensor t = at::tensor({0.0f, 1.0f, 517.25f});
  const at::Tensor embedding = timestep_embedding(t, 8);
  ASSERT_EQ(embedding.sizes(), (std::vector<int64_t>{3, 8}));
  for (int64_t b = 0; b < 3; ++b) {
    for (int64_t i = 0; i < 4; ++i) {
      const double angle = t[b].item<double>() * std::pow(10000.0, -i / 4.0);
      EXPECT_NEAR(embedding[b][i].item<double>(), std::cos(angle), 1e-4);
      EXPECT_NEAR(embedding[b][4 + i].item<double>(), std::sin(angle), 1e-4);
    }
  }
}

TEST(SincosPositionTable, FirstHalfIsTheColumnSecondTheRowSineFirst) {
  const at::Tensor table = sincos_position_table(8, 2, 3);
  ASSERT_EQ(table.sizes(), (std::vector<int64_t>{1, 6, 8}));
  const at::Tensor token = table[0][1 * 3 + 2];  // row 1, column 2
  const double expected[] = {std::sin(2), std::sin(0.02), std::cos(2), std::cos(0.02),
                             std::sin(1), std::sin(0.01), std::cos(1), std::cos(0.01)};
  for (int64_t i = 0; i < 8; ++i)
    EXPECT_FLOAT_EQ(token[i].item<float>(), static_cast<float>(expected[i])) << i;
}

TEST(Patchify, ThenLinearIsTheStridedConvolution) {
  const at::Tensor x = at::randn({2, 3, 8, 12}, at::kDouble), weight = at::randn({5, 3, 4, 4}, at::kDouble);
  const at::Tensor tokens = at::matmul(patchify(x, 4), weight.flatten(1).t());
  const at::Tensor expected = at::conv2d(x, weight, {}, /*stride=*/4).flatten(2).transpose(1, 2);
  EXPECT_TRUE(at::allclose(tokens, expected));
}

TEST(Unpatchify, PutsChannelsFastest) {
  const int64_t p = 2, grid_h = 3, grid_w = 2, channels = 3;
  const at::Tensor tokens = at::arange(grid_h * grid_w * p * p * channels).view({1, grid_h * grid_w, -1});
  const at::Tensor image = unpatchify(tokens, p, grid_h, grid_w);
  ASSERT_EQ(image.sizes(), (std::vector<int64_t>{1, channels, grid_h * p, grid_w * p}));
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t y = 0; y < grid_h * p; ++y)
      for (int64_t x = 0; x < grid_w * p; ++x) {
        const int64_t token = y / p * grid_w + x / p, element = ((y % p) * p + x % p) * channels + c;
        EXPECT_EQ(image[0][c][y][x].item<int64_t>(), tokens[0][token][element].item<int64_t>());
      }
}

}  // namespace
}  // namespace kiln::nn
