#include "core/philox.h"

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace kiln {
namespace {

using Words = std::array<uint32_t, 4>;

// Known-answer vectors published with Random123 1.14 (kat_vectors, philox4x32 10).
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(philox4x32_10({0, 0, 0, 0}, {0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const uint32_t ones = 0xffffffff;
  EXPECT_EQ(philox4x32_10({ones, ones, ones, ones}, {ones, ones}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  // Counter and key are digits of pi.
  EXPECT_EQ(philox4x32_10({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

std::vector<float> normals(uint64_t seed, Draw draw, uint64_t index, size_t size) {
  std::vector<float> out(size);
  philox_normal(seed, draw, index, out);
  return out;
}

// What the SIMD code claims to compute, in double: word w of block b of a group of 16 blocks.
double reference_normal(uint64_t seed, Draw draw, uint64_t index, size_t j) {
  const size_t group = j / 64, word = j % 64 / 16, block = group * 16 + j % 16;
  const auto words = philox4x32_10({static_cast<uint32_t>(block), static_cast<uint32_t>(draw),
                                    static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32)},
                                   {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  const uint32_t a = words[word & 2], b = words[(word & 2) + 1];
  const double u = static_cast<double>((a >> 1) + 0.5f) * 0x1p-31;
  const double angle = 2 * M_PI * b * 0x1p-32;
  return std::sqrt(-2 * std::log(u)) * (word & 1 ? std::sin(angle) : std::cos(angle));
}

TEST(PhiloxNormal, IsBoxMullerOfItsWords) {
  const uint64_t seed = 0x123456789abcdef0, index = 0xfedcba9876543210;
  const auto out = normals(seed, Draw::kPosterior, index, 1 << 16);
  for (size_t j = 0; j < out.size(); ++j) {
    const double expected = reference_normal(seed, Draw::kPosterior, index, j);
    // f32 arithmetic: radius and angle each to about 2 ulp.
    ASSERT_NEAR(out[j], expected, 2e-6 + 5e-7 * std::abs(expected)) << j;
  }
}

TEST(PhiloxNormal, ElementsDoNotDependOnTheLength) {
  const auto all = normals(7, Draw::kNoise, 3, 1000);
  for (const size_t size : {0, 1, 15, 16, 17, 63, 64, 65, 127, 640, 999}) {
    const auto some = normals(7, Draw::kNoise, 3, size);
    EXPECT_TRUE(std::equal(some.begin(), some.end(), all.begin())) << size;
  }
}

TEST(PhiloxNormal, SeedPurposeAndIndexAllMatter) {
  const auto base = normals(7, Draw::kNoise, 3, 64);
  EXPECT_NE(base, normals(8, Draw::kNoise, 3, 64));
  EXPECT_NE(base, normals(7 + (uint64_t{1} << 32), Draw::kNoise, 3, 64));
  EXPECT_NE(base, normals(7, Draw::kPosterior, 3, 64));
  EXPECT_NE(base, normals(7, Draw::kNoise, 4, 64));
  EXPECT_NE(base, normals(7, Draw::kNoise, 3 + (uint64_t{1} << 32), 64));
}

TEST(PhiloxNormal, SameBitsOnEveryTarget) {
  const auto best = normals(11, Draw::kNoise, 5, 100'003);
  int num_targets = 0;
  for (int64_t targets = hwy::SupportedTargets() | HWY_SCALAR; targets != 0; targets &= targets - 1) {
    const int64_t target = targets & -targets;
    hwy::GetChosenTarget().Update(target);
    const auto out = normals(11, Draw::kNoise, 5, best.size());
    EXPECT_EQ(std::memcmp(out.data(), best.data(), best.size() * sizeof(float)), 0)
        << hwy::TargetName(target);
    ++num_targets;
  }
  hwy::GetChosenTarget().DeInit();
  EXPECT_GE(num_targets, 2);
}

struct Moments {
  double mean = 0, variance = 0, skewness = 0, kurtosis = 0;
};

Moments moments(const std::vector<float>& x) {
  Moments m;
  for (const double v : x) m.mean += v / static_cast<double>(x.size());
  for (const double v : x) {
    const double d = v - m.mean, n = static_cast<double>(x.size());
    m.variance += d * d / n;
    m.skewness += d * d * d / n;
    m.kurtosis += d * d * d * d / n;
  }
  m.skewness /= std::pow(m.variance, 1.5);
  m.kurtosis /= m.variance * m.variance;
  return m;
}

// Tolerances are five standard errors of a true normal sample of this size.
TEST(PhiloxNormal, Moments) {
  constexpr size_t kSize = 1 << 22;
  const Moments m = moments(normals(42, Draw::kNoise, 0, kSize));
  const double n = kSize;
  EXPECT_NEAR(m.mean, 0, 5 / std::sqrt(n));
  EXPECT_NEAR(m.variance, 1, 5 * std::sqrt(2 / n));
  EXPECT_NEAR(m.skewness, 0, 5 * std::sqrt(6 / n));
  EXPECT_NEAR(m.kurtosis, 3, 5 * std::sqrt(24 / n));
}

double correlation(const std::vector<float>& x, const std::vector<float>& y) {
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += static_cast<double>(x[i]) * y[i];
  return sum / static_cast<double>(x.size());
}

TEST(PhiloxNormal, StreamsAreUncorrelated) {
  constexpr size_t kSize = 1 << 20;
  const double bound = 5 / std::sqrt(static_cast<double>(kSize));
  const auto base = normals(42, Draw::kNoise, 9, kSize);
  EXPECT_NEAR(correlation(base, normals(43, Draw::kNoise, 9, kSize)), 0, bound);
  EXPECT_NEAR(correlation(base, normals(42, Draw::kNoise, 10, kSize)), 0, bound);
  EXPECT_NEAR(correlation(base, normals(42, Draw::kPosterior, 9, kSize)), 0, bound);
  // Within a stream: neighbours, the other half of a Box-Muller pair (16 on), the next pair (32 on), the next
  // group.
  for (const size_t lag : {1, 16, 32, 64}) {
    const std::vector<float> later(base.begin() + static_cast<int64_t>(lag), base.end());
    EXPECT_NEAR(correlation(later, base), 0, bound) << lag;
  }
}

TEST(PhiloxNormal, KolmogorovSmirnov) {
  auto x = normals(1234, Draw::kSampleStart, 1, 1 << 20);
  std::sort(x.begin(), x.end());
  const double n = static_cast<double>(x.size());
  double distance = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double cdf = 0.5 * std::erfc(-x[i] / std::sqrt(2.0));
    distance = std::max({distance, (i + 1) / n - cdf, cdf - i / n});
  }
  EXPECT_LT(distance * std::sqrt(n), 1.95);  // exceeded by a true normal sample with probability 0.001
  EXPECT_GT(x.back(), 4.5);
  EXPECT_LT(x.back(), 6.67);  // sqrt(2 ln 2^32)
}

TEST(PhiloxUniform, FillsTheUnitInterval) {
  constexpr int kSize = 200'000;
  std::vector<int> bins(20);
  double sum = 0;
  for (int i = 0; i < kSize; ++i) {
    const double u = philox_uniform(3, Draw::kTimestep, i);
    ASSERT_GE(u, 0);
    ASSERT_LT(u, 1);
    sum += u;
    ++bins[static_cast<size_t>(u * 20)];
  }
  EXPECT_NEAR(sum / kSize, 0.5, 5 * std::sqrt(1.0 / 12 / kSize));
  double chi_square = 0;
  for (const int count : bins) chi_square += std::pow(count - kSize / 20.0, 2) / (kSize / 20.0);
  EXPECT_LT(chi_square, 43.8);  // 19 degrees of freedom, probability 0.001
}

TEST(PhiloxUniform, HasFiftyThreeBitsAndItsOwnStream) {
  bool low_bit = false;
  for (uint64_t i = 0; i < 64; ++i) {
    low_bit |= static_cast<uint64_t>(philox_uniform(3, Draw::kTimestep, i) * 0x1p53) & 1;
  }
  EXPECT_TRUE(low_bit);
  EXPECT_NE(philox_uniform(3, Draw::kTimestep, 1, 0), philox_uniform(3, Draw::kTimestep, 1, 1));
  EXPECT_NE(philox_uniform(3, Draw::kTimestep, 1), philox_uniform(3, Draw::kFlip, 1));
}

}  // namespace
}  // namespace kiln
