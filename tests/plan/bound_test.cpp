// The bound of a step: the ideal list of a model, and the least time in which a machine could compute it.
#include <gtest/gtest.h>

#include <numeric>

#include "core/aten.h"
#include "core/dry_run.h"
#include "models/forward_flops.h"
#include "models/registry.h"
#include "ops/ops.h"
#include "plan/price/step_timing.h"
#include "plan/trace/ideal_step.h"
#include "train/settings.h"
#include "watch/step_bound.h"

namespace kiln {
namespace {

using Forward = std::function<at::Tensor(const at::Tensor& x, const at::Tensor& weight)>;

// One segment with a weight (12, 8).
class OneSegment : public Segment {
 public:
  explicit OneSegment(Forward forward) : forward_(std::move(forward)) { name_ = "only"; }
  State forward(const State&, const ModelInput& input) const override {
    return {.hidden = forward_(input.x_t, weight_)};
  }

 private:
  Forward forward_;
  at::Tensor weight_ = at::empty({12, 8}, at::TensorOptions(at::kMeta).dtype(at::kBFloat16));
};

class OneSegmentModel : public SegmentModel {
 public:
  explicit OneSegmentModel(Forward forward) {
    segments_.push_back(std::make_unique<OneSegment>(std::move(forward)));
  }
};

SegmentWork work_of_segment(at::IntArrayRef sizes, Forward forward) {
  const OneSegmentModel model(std::move(forward));
  const at::Tensor x = at::empty(sizes, at::TensorOptions(at::kMeta).dtype(at::kBFloat16));
  const auto work = forward_work(model, {.x_t = x}, at::kBFloat16);
  EXPECT_EQ(work.size(), 1U);
  EXPECT_EQ(work.front().name, "only");
  return work.front();
}

at::Tensor layer(const at::Tensor& x, const at::Tensor& weight) {
  return ops::linear(x, weight, std::nullopt, at::kBFloat16);
}

template <class Member>
double sum_of(const std::vector<SegmentWork>& work, Member member) {
  double sum = 0;
  for (const SegmentWork& segment : work) sum += segment.*member;
  return sum;
}

TEST(IdealWork, OfALayerIsOneProductAndItsInput) {
  const SegmentWork work = work_of_segment({5, 8}, layer);
  EXPECT_EQ(work.flops, 2 * 5 * 8 * 12);
  EXPECT_EQ(work.kept_bytes, 2 * 5 * 8);
}

TEST(IdealWork, KeepsWhatSeveralProductsTakeOnce) {
  const SegmentWork work = work_of_segment({5, 8}, [](const at::Tensor& x, const at::Tensor& weight) {
    return layer(x, weight) + layer(x, weight);
  });
  EXPECT_EQ(work.flops, 2 * 2 * 5 * 8 * 12);
  EXPECT_EQ(work.kept_bytes, 2 * 5 * 8);
}

TEST(IdealWork, OfAttentionIsTwoProductsAndThePackedProjection) {
  const int64_t b = 2, n = 7, heads = 3, d = 16;
  const SegmentWork work = work_of_segment({b, n, 3, heads, d}, [](const at::Tensor& qkv, const at::Tensor&) {
    return ops::packed_attention(qkv, 0.25);
  });
  EXPECT_EQ(work.flops, 4 * b * heads * n * n * d);
  EXPECT_EQ(work.kept_bytes, 2 * b * n * 3 * heads * d);
}

// What stays f32 on a device without bf16 is no more for a better one.
TEST(IdealWork, KeepsNothingInMoreBitsThanTheModelComputesIn) {
  const SegmentWork work = work_of_segment({5, 8}, [](const at::Tensor& x, const at::Tensor& weight) {
    return ops::linear(x.to(at::kFloat), weight.to(at::kFloat), std::nullopt, at::kFloat);
  });
  EXPECT_EQ(work.kept_bytes, 2 * 5 * 8);
}

TEST(IdealWork, OfCaptionsCountsEachRowOnce) {
  const at::NoGradGuard no_grad;
  const auto denoiser = build_denoiser("PixArt-Sigma-XL/2-512", {{"depth", 2}}, {.device = at::kMeta});
  ForwardFlops whole("PixArt-Sigma-XL/2-512", {{"depth", 2}});
  const auto with_rows = [&](double rows) {
    return forward_work(*denoiser, {.height = 16, .width = 16, .text_rows = rows}, at::kBFloat16);
  };
  for (const double rows : {1.0, 33.0, 77.5}) {
    EXPECT_NEAR(sum_of(with_rows(rows), &SegmentWork::flops), whole({16, 16, rows}),
                1e-9 * whole({16, 16, rows}));
  }
  // The projection of a caption's row, its keys and values in each block, and 64 tokens that attend to it.
  const double width = 1152,
               of_row = 2 * (4096 * width + width * width) + 2 * (4 * width * width + 4 * 64 * width);
  EXPECT_NEAR(sum_of(with_rows(34), &SegmentWork::flops) - sum_of(with_rows(33), &SegmentWork::flops), of_row,
              1e-6 * of_row);
  // A row is kept as it comes, after each of the two layers' inputs, and as keys and values of each block.
  const double kept = 2 * (4096 + 2 * width + 2 * 2 * width);
  EXPECT_NEAR(
      sum_of(with_rows(34), &SegmentWork::kept_bytes) - sum_of(with_rows(33), &SegmentWork::kept_bytes), kept,
      1e-6 * kept);
}

TEST(IdealStep, TriplesTheForwardAndMovesTheStateTwice) {
  const TrainOptions options =
      changed({}, "model=DiT-S/8 depth=2 global-batch=6 compute-dtype=bf16 ema-decay=[0.9]");
  const DataShape data = synthetic_shape(options);
  const std::vector<IdealSegment> segments = ideal_step(options, data);
  const Training training = build_training(options, data, at::kMeta);
  const auto denoiser = build_denoiser("DiT-S/8", training.model_config, {.device = at::kMeta});
  const auto work = forward_work(*denoiser, largest_extent(data), at::kBFloat16);
  ASSERT_EQ(segments.size(), 4U);  // embed, two blocks, final
  ASSERT_EQ(work.size(), 4U);
  double flops = 0;
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(segments[i].name, work[i].name);
    EXPECT_EQ(segments[i].flops, 3 * 6 * work[i].flops);
    // bf16 weights and gradients; master, two moments and an average in f32.
    const auto weights = static_cast<double>(training.state->segments[i].unit.size());
    EXPECT_EQ(segments[i].bytes, 2 * (weights * (2 + 2 + 4 * 4) + 6 * work[i].kept_bytes));
    flops += segments[i].flops;
  }
  EXPECT_DOUBLE_EQ(flops, 6 * flops_of_image(training, largest_extent(data)));
}

TEST(StepBound, SumsTheLongerOfArithmeticAndBytes) {
  const MachineRates rates{.flops_per_s = 100, .bytes_per_s = 10};
  const nlohmann::json bound = bound_json({{.name = "a", .flops = 200, .bytes = 10},   // 2 s of arithmetic
                                           {.name = "b", .flops = 100, .bytes = 30}},  // 3 s of memory
                                          rates, {}, /*measured_s=*/10);
  EXPECT_EQ(bound.at("seconds"), 5);
  EXPECT_EQ(bound.at("share"), 0.5);
  EXPECT_EQ(bound.at("flops"), 300);
  EXPECT_EQ(bound.at("bytes"), 40);
  EXPECT_EQ(bound.at("segments")[1].at("seconds"), 3);
  EXPECT_TRUE(bound.at("operations").empty());
}

TEST(StepBound, ListsOperationsAboveOnePercent) {
  const std::vector<OpRecord> ops = {{.name = "aten::mul", .bytes = 20, .seconds = 4},
                                     {.name = "kiln::affine", .flops = 300, .bytes = 1, .seconds = 5},
                                     {.name = "aten::mul", .bytes = 20, .seconds = 4},
                                     {.name = "aten::add", .bytes = 1, .seconds = 0.1}};
  const nlohmann::json bound = bound_json({}, {.flops_per_s = 100, .bytes_per_s = 10}, ops, 15);
  const nlohmann::json& rows = bound.at("operations");
  ASSERT_EQ(rows.size(), 2U);
  EXPECT_EQ(rows[0].at("operation"), "aten::mul f32");
  EXPECT_EQ(rows[0].at("num"), 2);
  EXPECT_EQ(rows[0].at("bound_s"), 4);
  EXPECT_EQ(rows[1].at("bound_s"), 3);
  EXPECT_NE(bound_text(bound).find("aten::mul f32"), std::string::npos);
}

// No operation of a step may be faster than the machine is said to be.
TEST(StepBound, TakesTheRateOfAFasterProductOfTheStep) {
  const std::vector<OpRecord> ops = {{.name = "kiln::affine", .flops = 1000, .seconds = 2},
                                     {.name = "kiln::affine", .flops = 1000, .seconds = 1e-5}};
  EXPECT_EQ(raised_by(ops, {.flops_per_s = 100, .bytes_per_s = 1}).flops_per_s, 500);
  EXPECT_EQ(raised_by(ops, {.flops_per_s = 700, .bytes_per_s = 1}).flops_per_s, 700);
}

TEST(StepBound, IsNoMoreThanAStepTakes) {
  const TrainOptions options = changed({}, "model=DiT-S/8 depth=2 global-batch=8 device=cpu");
  const StepTiming timing = time_steps(options, at::kCPU, {.plain = 3, .watched = 1});
  const nlohmann::json bound =
      bound_json(ideal_step(options, synthetic_shape(options)), measure_rates(at::kCPU, at::kFloat),
                 ops_of(timing.spans), timing.least_seconds);
  EXPECT_GT(bound.at("share").get<double>(), 0.02);
  EXPECT_LE(bound.at("share").get<double>(), 1);
}

}  // namespace
}  // namespace kiln
