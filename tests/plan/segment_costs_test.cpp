// The peak of any mixture of memory choices, against its own trace; the search, against trying everything.
#include "plan/memory/segment_costs.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <random>
#include <ranges>

#include "models/registry.h"
#include "train/memory_choices.h"
#include "train/settings.h"
#include "train/usable_options.h"

namespace kiln {
namespace {

using enum Activations;

std::vector<MemoryChoice> decode(size_t code, size_t num_segments, size_t num_activations) {
  std::vector<MemoryChoice> choices;
  for (; choices.size() < num_segments; code /= num_activations)
    choices.push_back({static_cast<Activations>(code % num_activations)});
  return choices;
}

size_t power(size_t base, size_t exponent) { return exponent == 0 ? 1 : base * power(base, exponent - 1); }

StepTrace trace_mixture(TrainOptions options, const std::vector<MemoryChoice>& choices, const DataShape& data,
                        DryRunDevice device, int64_t world_size) {
  const auto denoiser = build_denoiser(
      options.model.name,
      denoiser_config_of(options, data, *make_objective(objective_config_of(options.objective))),
      {.device = at::kMeta});
  set_memory_choices(options.memory, choices, *denoiser);
  return trace_step(options, data, device, world_size);
}

struct CostSetting {
  const char* name;
  DryRunDevice device;
  const char* dtype;
  int64_t global_batch, micro_batch;
  int64_t world_size = 1, zero_stage = 0;
};

// Each pair of choices of two segments side by side, or of every second. KILN_FULL=1: and many at random.
std::vector<std::vector<MemoryChoice>> some_mixtures(size_t num_segments) {
  std::vector<std::vector<MemoryChoice>> mixtures;
  for (size_t first = 0; first < 3; ++first)
    for (size_t step = 0; step < 3; ++step) {
      mixtures.emplace_back();
      for (size_t i = 0; i < num_segments; ++i)
        mixtures.back().push_back({static_cast<Activations>((first + i * step) % 3)});
    }
  const int num_random = std::getenv("KILN_FULL") ? 16 : 0;
  std::mt19937 random(1);
  for (int i = 0; i < num_random; ++i)
    mixtures.push_back(decode(random() % power(3, num_segments), num_segments, 3));
  return mixtures;
}

class Mixtures : public ::testing::TestWithParam<CostSetting> {};

TEST_P(Mixtures, PeakIsThatOfTheirOwnTrace) {
  const CostSetting& setting = GetParam();
  TrainOptions options = changed(test::tiny_dit_options(), {{"compute-dtype", setting.dtype}});
  options.global_batch = setting.global_batch;
  options.micro_batch = setting.micro_batch;
  const DataShape data = synthetic_shape(options);
  options.zero.stage = setting.zero_stage;
  const StepCosts costs = step_costs(options, data, setting.device, setting.world_size);
  for (const std::vector<MemoryChoice>& choices : some_mixtures(costs.num_segments())) {
    const StepTrace trace = trace_mixture(options, choices, data, setting.device, setting.world_size);
    EXPECT_EQ(peak_bytes(costs, choices), trace.memory.peak_bytes)
        << trace.options.memory.recompute.text() << " / " << trace.options.memory.offload_activations.text();
    double flops = 0;
    for (const Span& span : trace.spans)
      for (const OpRecord& op : span.ops)
        if (span.phase == StepPhase::kRecompute) flops += op.flops * static_cast<double>(span.times);
    EXPECT_NEAR(recompute_flops(costs, choices), flops, 1e-6 * flops);
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, Mixtures,
                         ::testing::Values(CostSetting{"cpu_f32", DryRunDevice::kCpu, "f32", 6, 0},
                                           CostSetting{"cpu_bf16_rest", DryRunDevice::kCpu, "bf16", 7, 3},
                                           CostSetting{"cpu_fp16_many", DryRunDevice::kCpu, "fp16", 13, 2},
                                           CostSetting{"cpu_stage2", DryRunDevice::kCpu, "f32", 12, 2, 2, 2},
                                           CostSetting{"cuda_stage3", DryRunDevice::kCuda, "bf16", 12, 0, 2,
                                                       3},
                                           CostSetting{"cuda_f32", DryRunDevice::kCuda, "f32", 6, 0},
                                           CostSetting{"cuda_bf16_rest", DryRunDevice::kCuda, "bf16", 7, 3},
                                           CostSetting{"cuda_bf16_many", DryRunDevice::kCuda, "bf16", 13, 2}),
                         [](const auto& info) { return info.param.name; });

TEST(SegmentCosts, RecomputingAndOffloadingSaveMemory) {
  TrainOptions options = test::tiny_dit_options();
  options.compute.dtype = at::kBFloat16;
  options.global_batch = 64;
  const StepCosts costs = step_costs(options, synthetic_shape(options), DryRunDevice::kCuda);
  const auto uniform = [&](Activations choice) {
    return peak_bytes(costs, std::vector<MemoryChoice>(costs.num_segments(), {choice}));
  };
  EXPECT_LT(uniform(kRecompute), uniform(kKeep));
  EXPECT_LT(uniform(kOffload), uniform(kRecompute));
  EXPECT_GT(recompute_flops(costs, {costs.num_segments(), {kRecompute}}), 0);
  EXPECT_FALSE(step_costs(options, synthetic_shape(options), DryRunDevice::kCpu).can_offload);
}

// Segments that are unlike each other.
StepCosts random_costs(size_t num_segments, size_t num_walks, bool can_offload, uint32_t seed) {
  std::mt19937 random(seed);
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  StepCosts costs{.walks = {},
                  .recompute_flops = {},
                  .host_bytes = {},
                  .persistent_bytes = 1000,
                  .other_peak_bytes = 1100,
                  .can_offload = can_offload};
  for (size_t i = 0; i < num_segments; ++i) {
    costs.recompute_flops.push_back(static_cast<double>(draw(1, 6)));
    costs.host_bytes.push_back(i == 0 ? 0 : draw(5, 20));
  }
  for (size_t w = 0; w < num_walks; ++w) {
    WalkCosts walk{.live_bytes = 1000 + draw(0, 30), .segments = {}, .loss_peak_bytes = draw(10, 60)};
    for (size_t i = 0; i < num_segments; ++i) {
      SegmentCosts segment;
      const int64_t input = costs.host_bytes[i], saved = draw(20, 200), scratch = draw(10, 80);
      segment.fetched_bytes = input;
      segment.choices[0] = {.held_bytes = 10 + saved,
                            .forward_peak_bytes = saved + scratch,
                            .backward_peak_bytes = saved + scratch + draw(0, 40)};
      segment.choices[1] = {.held_bytes = 10,
                            .forward_peak_bytes = scratch,
                            .recompute_peak_bytes = saved + scratch,
                            .backward_peak_bytes = segment.choices[0].backward_peak_bytes};
      segment.choices[2] = segment.choices[1];
      segment.choices[2].held_bytes -= input;
      walk.segments.push_back(segment);
    }
    costs.walks.push_back(walk);
  }
  return costs;
}

TEST(FitMemory, RecomputesNoMoreThanTryingEverything) {
  for (uint32_t seed = 0; seed < 24; ++seed) {
    const bool can_offload = seed % 2 == 0;
    const size_t num_segments = seed < 20 ? 4 + seed % 3 : 8, num_activations = can_offload ? 3 : 2;
    const StepCosts costs = random_costs(num_segments, 1 + seed % 3 / 2, can_offload, seed);
    struct Tried {
      int64_t peak;
      double flops;
      int64_t host;
    };
    std::vector<Tried> all;
    int64_t smallest = INT64_MAX, largest = 0;
    for (size_t code = 0; code < power(num_activations, num_segments); ++code) {
      const auto choices = decode(code, num_segments, num_activations);
      all.push_back(
          {peak_bytes(costs, choices), recompute_flops(costs, choices), host_bytes(costs, choices)});
      smallest = std::min(smallest, all.back().peak);
      largest = std::max(largest, all.back().peak);
    }
    EXPECT_EQ(smallest_peak_bytes(costs), smallest);
    EXPECT_TRUE(fit_memory(costs, smallest - 1).empty());
    for (int64_t budget = smallest; budget <= largest;
         budget += std::max<int64_t>(1, (largest - smallest) / 29)) {
      std::pair<double, int64_t> best{1e30, 0};
      for (const Tried& tried : all)
        if (tried.peak <= budget) best = std::min(best, {tried.flops, tried.host});
      const std::vector<MemoryChoice> choices = fit_memory(costs, budget);
      ASSERT_FALSE(choices.empty());
      EXPECT_LE(peak_bytes(costs, choices), budget);
      EXPECT_EQ(recompute_flops(costs, choices), best.first) << "seed " << seed << " budget " << budget;
      EXPECT_EQ(host_bytes(costs, choices), best.second) << "seed " << seed << " budget " << budget;
    }
  }
}

// Budgets over a real model's range: never more recomputation than the best of all mixtures.
TEST(FitMemory, RecomputesNoMoreThanTryingEverythingOnASmallModel) {
  TrainOptions options = test::tiny_dit_options();
  options.model.depth = 5;
  options.micro_batch = 2;
  for (DryRunDevice device : {DryRunDevice::kCpu, DryRunDevice::kCuda}) {
    const StepCosts costs = step_costs(options, synthetic_shape(options), device);
    const size_t num_activations = costs.can_offload ? 3 : 2;
    std::vector<std::pair<int64_t, double>> all;  // peak, recomputed FLOPs
    for (size_t code = 0; code < power(num_activations, costs.num_segments()); ++code) {
      const auto choices = decode(code, costs.num_segments(), num_activations);
      all.emplace_back(peak_bytes(costs, choices), recompute_flops(costs, choices));
    }
    const auto [least, most] = std::ranges::minmax(all | std::views::keys);
    std::mt19937 random(3);
    for (int i = 0; i < 30; ++i) {
      const int64_t budget = std::uniform_int_distribution<int64_t>(least, most)(random);
      double best = 1e30;
      for (const auto& [peak, flops] : all)
        if (peak <= budget) best = std::min(best, flops);
      const std::vector<MemoryChoice> choices = fit_memory(costs, budget);
      EXPECT_LE(peak_bytes(costs, choices), budget);
      EXPECT_EQ(recompute_flops(costs, choices), best) << budget;
    }
  }
}

TEST(FitMemory, KeepsEverythingWhereItFits) {
  const StepCosts costs = random_costs(30, 1, true, 5);
  const std::vector<MemoryChoice> choices = fit_memory(costs, int64_t{1} << 40);
  for (const MemoryChoice& choice : choices) EXPECT_EQ(choice.activations, kKeep);
  EXPECT_EQ(choices.size(), 30u);
}

}  // namespace
}  // namespace kiln
