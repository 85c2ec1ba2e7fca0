#include "data/store/latent_kernels.h"

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/philox.h"

namespace kiln {
namespace {

// Calls `check` once per SIMD target of this machine.
template <class Check>
void on_every_target(const Check& check) {
  for (int64_t targets = hwy::SupportedTargets(); targets != 0; targets &= targets - 1) {
    const int64_t target = targets & -targets;
    hwy::GetChosenTarget().Update(target);
    SCOPED_TRACE(hwy::TargetName(target));
    check();
  }
  hwy::GetChosenTarget().DeInit();
}

std::vector<float> normals(uint64_t index, size_t size) {
  std::vector<float> out(size);
  philox_normal(5, Draw::kNoise, index, out);
  return out;
}

TEST(LatentKernels, EveryHalfPrecisionValueIsWidenedExactly) {
  std::vector<uint16_t> halves(1 << 16);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
  const auto* bytes = reinterpret_cast<const std::byte*>(halves.data());
  on_every_target([&] {
    std::vector<float> out(halves.size());
    latents_to_f32(Dtype::kBF16, bytes, out);
    for (size_t i = 0; i < out.size(); ++i) {
      const float expected = bf16_to_float(halves[i]);
      ASSERT_TRUE(out[i] == expected || (std::isnan(out[i]) && std::isnan(expected))) << i;
    }
    latents_to_f32(Dtype::kF16, bytes, out);
    for (size_t i = 0; i < out.size(); ++i) {
      const float expected = fp16_to_float(halves[i]);
      ASSERT_TRUE(out[i] == expected || (std::isnan(out[i]) && std::isnan(expected))) << i;
    }
  });
}

TEST(LatentKernels, NarrowingRoundsToNearestEven) {
  std::vector<float> values = normals(0, 1003);
  const float inf = std::numeric_limits<float>::infinity();
  for (const float special :
       {0.0f, -0.0f, 1.00390625f, 1.01171875f, 3.4e38f, 1e-42f, inf, -inf, std::nanf("")}) {
    values.push_back(special);
  }
  on_every_target([&] {
    std::vector<uint16_t> out(values.size()), halves(values.size());
    latents_from_f32(values, Dtype::kBF16, reinterpret_cast<std::byte*>(out.data()));
    latents_from_f32(values, Dtype::kF16, reinterpret_cast<std::byte*>(halves.data()));
    for (size_t i = 0; i < out.size(); ++i) {
      ASSERT_EQ(out[i], float_to_bf16(values[i])) << values[i];
      ASSERT_EQ(halves[i], float_to_fp16(values[i])) << values[i];
    }
  });
}

TEST(LatentKernels, PosteriorMatchesDoubleAndIsTheSameOnEveryTarget) {
  const size_t size = 4099;  // not a multiple of any vector
  const auto mean = normals(1, size), epsilon = normals(2, size);
  auto logvar = normals(3, size);
  for (float& v : logvar) v = v * 12 - 6;  // reaches beyond both ends of the clamp
  logvar[0] = -1e30f;
  logvar[1] = 1e30f;
  std::vector<float> first;
  on_every_target([&] {
    auto x = mean;
    draw_posterior(x, logvar, epsilon, 0.25f, 0.18215f);
    for (size_t i = 0; i < size; ++i) {
      const double sigma = std::exp(0.5 * std::clamp<double>(logvar[i], -30, 20));
      const double expected = (mean[i] + sigma * epsilon[i] - 0.25) * static_cast<double>(0.18215f);
      const double scale = std::abs(mean[i]) + sigma * std::abs(epsilon[i]) + 0.25;
      ASSERT_NEAR(x[i], expected, 4e-7 * scale) << logvar[i];
    }
    if (first.empty()) first = x;
    EXPECT_EQ(std::memcmp(x.data(), first.data(), size * sizeof(float)), 0);
  });
}

TEST(LatentKernels, ScalesMirrorsAndFindsNonFinite) {
  on_every_target([] {
    std::vector<float> x = {1, 2, 3, 4, 5, 6};
    scale_latents(x, 1, 0.5f);
    EXPECT_EQ(x, (std::vector<float>{0, 0.5f, 1, 1.5f, 2, 2.5f}));
    mirror_rows(x, 3);
    EXPECT_EQ(x, (std::vector<float>{1, 0.5f, 0, 2.5f, 2, 1.5f}));
    for (const size_t size : {1, 7, 64, 129}) {
      for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity(), -INFINITY}) {
        std::vector<float> values = normals(4, size);
        EXPECT_EQ(find_nonfinite(values), -1);
        for (const size_t at : {size_t{0}, size / 2, size - 1}) {
          auto damaged = values;
          damaged[at] = bad;
          EXPECT_EQ(find_nonfinite(damaged), static_cast<int64_t>(at));
        }
      }
    }
  });
}

}  // namespace
}  // namespace kiln
