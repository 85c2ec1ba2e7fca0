// What a budget chooses, against planning every mixture of keeping and recomputing.
#include "plan/fit/machine_fit.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <random>

#include "models/registry.h"
#include "plan/memory/segment_costs.h"
#include "train/memory_choices.h"
#include "train/settings.h"
#include "train/usable_options.h"

namespace kiln {
namespace {

struct Setting {
  const char* name;
  const char* options;
};

class BudgetOf : public ::testing::TestWithParam<Setting> {
 protected:
  // What a budget is too little for, and what it costs to need so much.
  struct Mixture {
    int64_t needed = 0;
    double flops = 0;
  };

  BudgetOf() {
    data_ = describe(options_).shape;
    costs_ = step_costs(options_, data_, DryRunDevice::kCpu);
    denoiser_ = build_denoiser(
        options_.model.name,
        denoiser_config_of(options_, data_, *make_objective(objective_config_of(options_.objective))),
        {.device = at::kMeta});
  }

  double flops_of(const TrainOptions& options) const {
    return recompute_flops(costs_, parse_memory_choices(options.memory, *denoiser_));
  }

  std::vector<Mixture> all_mixtures(const MachineFit& fit) const {
    std::vector<Mixture> mixtures;
    const size_t num_segments = costs_.num_segments();
    for (size_t code = 0; code < size_t{1} << num_segments; ++code) {
      std::vector<MemoryChoice> choices;
      for (size_t i = 0; i < num_segments; ++i)
        choices.push_back({(code >> i) & 1 ? Activations::kRecompute : Activations::kKeep});
      TrainOptions mixed = options_;
      set_memory_choices(mixed.memory, choices, *denoiser_);
      mixtures.push_back({fit.needed(fit.plan(mixed)), flops_of(mixed)});
    }
    return mixtures;
  }

  const TrainOptions options_ = changed(test::tiny_dit_options(), GetParam().options);
  DataShape data_;
  StepCosts costs_;
  std::unique_ptr<Denoiser> denoiser_;
};

TEST_P(BudgetOf, IsKeptWithNoMoreFlopsThanTryingEverything) {
  const int num_budgets = std::getenv("KILN_FULL") ? 30 : 5;
  const MachineProfile machine = find_profile("cpu");
  const ProcessMemory process{.bytes = 150 << 20, .share = 0.01};
  const DataOutlook data = read_data_outlook({.train = options_});
  const auto within = [&](int64_t budget) {
    return MachineFit(machine, data, process, budget, /*world_size=*/1);
  };
  const std::vector<Mixture> all = all_mixtures(within(0));
  const auto [least, most] = std::ranges::minmax(all, {}, &Mixture::needed);
  ASSERT_LT(least.needed, most.needed);
  std::mt19937 random(11);
  int64_t num_mixed = 0;
  for (int i = 0; i < num_budgets; ++i) {
    const int64_t budget =
        std::uniform_int_distribution<int64_t>(least.needed, most.needed)(random) + 64;  // rounding
    double fewest = std::numeric_limits<double>::infinity();
    for (const Mixture& mixture : all)
      if (mixture.needed <= budget) fewest = std::min(fewest, mixture.flops);
    const MachineFit fit = within(budget);
    const std::optional<FittedChoice> chosen = fit.choose(options_);
    ASSERT_TRUE(chosen.has_value()) << budget;
    EXPECT_LE(fit.needed(chosen->plan), budget);
    EXPECT_LE(flops_of(chosen->options), fewest * (1 + 1e-12))
        << budget << ": --recompute " << chosen->options.memory.recompute.text();
    num_mixed += !chosen->options.memory.recompute.is_none() && !chosen->options.memory.recompute.is_all();
  }
  EXPECT_GT(num_mixed, 0);
  EXPECT_FALSE(within(least.needed - 64).choose(options_).has_value());
}

INSTANTIATE_TEST_SUITE_P(
    Models, BudgetOf,
    ::testing::Values(Setting{"f32", "global-batch=64"},
                      Setting{"bf16_passes",
                              "depth=3 hidden-size=96 patch-size=4 compute-dtype=bf16 global-batch=56 "
                              "micro-batch=24"},
                      Setting{"fp16_flow", "depth=5 compute-dtype=fp16 objective=flow global-batch=33"}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace kiln
