// Stochastic rounding against Philox as it is written down, bit for bit; that it is right in the mean, and
// what that is for.
#include "ops/update/stochastic_round.h"

#include <bit>
#include <cmath>
#include <limits>

#include "core/philox.h"
#include "ops/checks.h"

namespace kiln::ops {
namespace {

at::Tensor some_values(int64_t count) {
  at::manual_seed(3);
  return at::randn({count}) * at::exp(4 * at::randn({count}));
}

at::Tensor rounded_by(void (*round)(const at::Tensor&, const at::Tensor&, const RoundingDraw&),
                      const at::Tensor& values, const RoundingDraw& draw) {
  at::Tensor rounded = at::zeros(values.sizes(), at::kBFloat16);
  round(values, rounded, draw);
  return rounded.view(at::kShort);
}

// Value by value: the 16 bits of position p are half a word of block 16 (p / 128) + (p / 2) % 16.
std::vector<int16_t> slowly_rounded(const at::Tensor& values, const RoundingDraw& draw) {
  std::vector<int16_t> rounded;
  const uint64_t index = (static_cast<uint64_t>(draw.unit) << 40) + static_cast<uint64_t>(draw.update);
  for (int64_t i = 0; i < values.numel(); ++i) {
    const int64_t place = draw.first + i, word = place / 2 % 64;
    const auto words =
        philox4x32_10({static_cast<uint32_t>(place / 128 * 16 + word % 16), 15u, static_cast<uint32_t>(index),
                       static_cast<uint32_t>(index >> 32)},
                      {static_cast<uint32_t>(draw.seed), static_cast<uint32_t>(draw.seed >> 32)});
    const uint32_t half = words[static_cast<size_t>(word / 16)] >> (place % 2 * 16) & 0xFFFFu;
    const auto bits = std::bit_cast<uint32_t>(values.const_data_ptr<float>()[i]);
    rounded.push_back(static_cast<int16_t>((bits + half) >> 16));
  }
  return rounded;
}

TEST(StochasticRound, IsPhiloxByPositionWhateverTheSliceAndTheThreads) {
  const RoundingDraw draw{.seed = 0x123456789ABCDEF0, .unit = 7, .update = (int64_t{1} << 33) + 5};
  const at::Tensor values = some_values(40'000);
  const std::vector<int16_t> expected = slowly_rounded(values, draw);
  const int before = at::get_num_threads();
  const at::Tensor all = at::tensor(expected, at::kShort);
  for (const auto& [first, count] :
       {std::pair<int64_t, int64_t>{0, 40'000}, {16, 1}, {48, 31'000}, {129, 200}})
    for (const auto round : {&stochastic_round, &reference::stochastic_round})
      for (const int threads : {1, 2}) {
        at::set_num_threads(threads);
        RoundingDraw part = draw;
        part.first = first;
        EXPECT_TRUE(
            rounded_by(round, values.narrow(0, first, count), part).equal(all.narrow(0, first, count)))
            << first << " " << count << " " << threads;
      }
  at::set_num_threads(before);
  for (const RoundingDraw& other : {RoundingDraw{.seed = draw.seed + 1, .unit = 7, .update = draw.update},
                                    {.seed = draw.seed, .unit = 8, .update = draw.update},
                                    {.seed = draw.seed, .unit = 7, .update = draw.update + 1}})
    EXPECT_FALSE(rounded_by(stochastic_round, values, other).equal(all));
}

TEST(StochasticRound, KeepsWhatNeedsNoRounding) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity(),
                  kNan = std::numeric_limits<float>::quiet_NaN();
  const at::Tensor exact = at::cat(
      {some_values(1000).to(at::kBFloat16).to(at::kFloat), at::tensor({0.0f, -0.0f, kInfinity, -kInfinity})});
  at::Tensor rounded = at::zeros(exact.sizes(), at::kBFloat16);
  for (const auto round : {&stochastic_round, &reference::stochastic_round}) {
    round(exact, rounded, {.seed = 1});
    EXPECT_TRUE(rounded.to(at::kFloat).view(at::kInt).equal(exact.view(at::kInt)));
    at::Tensor one = at::zeros({2}, at::kBFloat16);
    const auto quiet_payload = std::bit_cast<float>(0x7F800001u);  // of bits that bf16 lacks
    round(at::tensor({kNan, quiet_payload}), one, {.seed = 1});
    EXPECT_TRUE(at::isnan(one).all().item<bool>());
  }
}

TEST(StochasticRound, IsRightInTheMean) {
  constexpr int64_t kDraws = 200'000;
  for (const float value : {1.0f + 0x1p-9f, -1.0f - 0x1p-8f, 3.1f, -0.001f, 1e-30f}) {
    const at::Tensor rounded = at::empty({kDraws}, at::kBFloat16);
    stochastic_round(at::full({kDraws}, value), rounded, {.seed = 5});
    const at::Tensor wide = rounded.to(at::kDouble);
    const double low = wide.min().item<double>(), high = wide.max().item<double>(), step = high - low;
    EXPECT_LT(step, std::abs(value) * 0x1p-7 * 1.001) << value;  // the two neighbours
    EXPECT_LE(low, value);
    EXPECT_GE(high, value);
    const double share = (value - low) / step, deviation = step * std::sqrt(share * (1 - share) / kDraws);
    EXPECT_NEAR(wide.mean().item<double>(), value, 4 * deviation) << value;
  }
}

// Least squares by AdamW whose updates are smaller than half a step of bf16.
TEST(StochasticRound, TrainsWhereRoundingToTheNearestStandsStill) {
  at::manual_seed(0);
  constexpr int64_t kWidth = 256;
  const at::Tensor x = at::randn({512, kWidth}), target = at::matmul(x, at::full({kWidth}, 1.25f));
  const auto loss_after = [&](const std::function<void(const at::Tensor&, at::Tensor&, int64_t)>& keep) {
    at::Tensor weights = at::full({kWidth}, 1.0f), master = weights.clone();
    at::Tensor mean = at::zeros({kWidth}), square = at::zeros({kWidth});
    std::vector<EmaSlice> no_emas;
    for (int64_t step = 1; step <= 200; ++step) {
      const at::Tensor grad = at::matmul(x.t(), at::matmul(x, weights) - target) / 512;
      AdamWStep options = adamw_options(1, step);
      options.weight_decay = 0;
      adamw_ema_step_(master, grad, mean, square, no_emas, nullptr, options);
      keep(master, weights, step);
      master.copy_(weights);
    }
    return (at::matmul(x, weights) - target).square().mean().item<double>();
  };
  const double before = (at::matmul(x, at::full({kWidth}, 1.0f)) - target).square().mean().item<double>();
  const double in_f32 = loss_after([](const at::Tensor& m, at::Tensor& w, int64_t) { w.copy_(m); });
  const double nearest =
      loss_after([](const at::Tensor& m, at::Tensor& w, int64_t) { w.copy_(m.to(at::kBFloat16)); });
  const double stochastic = loss_after([](const at::Tensor& m, at::Tensor& w, int64_t step) {
    const at::Tensor rounded = at::empty({kWidth}, at::kBFloat16);
    stochastic_round(m, rounded, {.seed = 2, .update = step});
    w.copy_(rounded);
  });
  EXPECT_DOUBLE_EQ(nearest, before);
  EXPECT_LT(in_f32, 0.2 * before);
  EXPECT_NEAR(stochastic, in_f32, 0.05 * before);
}

TEST(StochasticRound, RefusesWhatDoesNotFit) {
  const at::Tensor f32 = at::zeros({4}), bf16 = at::zeros({4}, at::kBFloat16);
  EXPECT_ERROR(stochastic_round(f32, f32, {.update = 1}), "bf16");
  EXPECT_ERROR(stochastic_round(f32, at::zeros({5}, at::kBFloat16), {.update = 1}), "as many");
  EXPECT_ERROR(stochastic_round(f32, bf16, {.update = int64_t{1} << 40}), "out of range");
}

}  // namespace
}  // namespace kiln::ops
