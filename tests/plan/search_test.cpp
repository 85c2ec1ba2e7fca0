// The search against plans of every configuration, one by one.
#include "plan/search.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "core/error.h"
#include "models/registry.h"

namespace kiln {
namespace {

using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;
using testing::ThrowsMessage;

// Small, on a GPU whose memory is between what the configurations need.
SearchOptions small_search() {
  SearchOptions options;
  TrainOptions& train = options.plan.train;
  train.model = "DiT-B/2";
  train.depth = 4;
  train.image_size = 512;
  options.plan.gpu = "T4";
  options.plan.gpus = 2;
  options.fixed = {"offload-optimizer"};
  return options;
}

struct Best {
  double figure = std::numeric_limits<double>::infinity();
  std::string command;
};

TEST(Search, FindsWhatPlanningEveryConfigurationFinds) {
  const SearchOptions options = small_search();
  const SearchResult result = search(options);
  const MachineProfile machine = planned_machine(options.plan);
  const std::vector<Configuration> all = configurations(options, machine, planned_shape(options.plan.train));
  EXPECT_EQ(all.size(), result.num_configurations);

  double fastest = std::numeric_limits<double>::infinity(), least = fastest;
  int64_t num_fitting = 0, num_mixtures = 0;
  for (const Configuration& configuration : all) {
    const Plan plan = make_plan(options_of(options, configuration));
    const std::string command = launch_command(plan);
    EXPECT_LE(static_cast<double>(configuration.least_bytes), 1.001 * static_cast<double>(plan.needed_bytes))
        << command;
    num_mixtures += configuration.recompute != "none" && configuration.recompute != "all";
    if (!plan.fits || configuration.step_s == 0) continue;
    ++num_fitting;
    // Collectives of many short passes over a slow link are where screening is least exact.
    EXPECT_NEAR(configuration.step_s, plan.step_s, 0.15 * plan.step_s) << command;
    fastest = std::min(fastest, plan.step_s);
    least = std::min(least, static_cast<double>(plan.needed_bytes));
  }
  EXPECT_GT(num_fitting, 10);
  EXPECT_LT(num_fitting, static_cast<int64_t>(all.size())) << "nothing is too large: the test tests little";
  EXPECT_GT(num_mixtures, 0);

  ASSERT_FALSE(result.best.empty());
  EXPECT_THAT(result.best.front().goal, StartsWith("fastest"));
  EXPECT_NEAR(result.best.front().plan.step_s, fastest, 5e-3 * fastest);
  EXPECT_THAT(result.best.back().goal, HasSubstr("least memory"));
  EXPECT_NEAR(static_cast<double>(result.best.back().plan.needed_bytes), least, 0.05 * least);
  for (const SearchChoice& choice : result.best) EXPECT_TRUE(choice.plan.fits) << choice.goal;
}

TEST(Search, KeepsWhatIsGiven) {
  SearchOptions options = small_search();
  options.plan.train.compute_dtype = "fp16";
  options.plan.train.micro_batch = 16;
  options.plan.train.recompute = "all";
  options.plan.train.zero_stage = 2;
  options.plan.train.offload_optimizer = "cpu";
  for (const char* name : kSearchedOptions) options.fixed.insert(name);
  const SearchResult result = search(options);
  EXPECT_EQ(result.num_configurations, 1);
  ASSERT_EQ(result.best.size(), 1);
  EXPECT_EQ(result.best[0].goal, "fastest that fits, cheapest, least memory");
  const Plan plan = make_plan(options.plan);
  EXPECT_DOUBLE_EQ(result.best[0].plan.step_s, plan.step_s);
  EXPECT_EQ(result.best[0].plan.needed_bytes, plan.needed_bytes);
}

TEST(Search, MeetsItsLimitsOrSaysWhatIsNearest) {
  SearchOptions options = small_search();
  options.any_gpus = true;
  options.plan.price_per_gpu_hour = 1;
  options.plan.steps = 1'000'000;
  const SearchResult free = search(options);
  ASSERT_GE(free.best.size(), 2);
  const Plan &fastest = free.best[0].plan, &cheapest = free.best[1].plan;
  EXPECT_LT(cheapest.cost, fastest.cost);
  EXPECT_GT(free.by_gpus.size(), 3);

  options.deadline_days = (fastest.days + cheapest.days) / 2;
  const SearchResult limited = search(options);
  ASSERT_FALSE(limited.best.empty());
  for (const SearchChoice& choice : limited.best) EXPECT_LE(choice.plan.days, options.deadline_days);
  EXPECT_GT(limited.best[1].plan.cost, cheapest.cost);

  options.deadline_days = fastest.days / 2;
  const SearchResult none = search(options);
  EXPECT_TRUE(none.best.empty());
  EXPECT_THAT(none.problem, AllOf(HasSubstr("days"), HasSubstr("kiln train"), Not(HasSubstr("\n"))));
  ASSERT_EQ(none.nearest.size(), 1);
  EXPECT_DOUBLE_EQ(none.nearest[0].plan.days, fastest.days);

  options.deadline_days = 0;
  options.max_cost = cheapest.cost / 2;
  const SearchResult poor = search(options);
  EXPECT_TRUE(poor.best.empty());
  EXPECT_DOUBLE_EQ(poor.nearest.at(0).plan.cost, cheapest.cost);
}

TEST(Search, SaysOnWhatItWouldFit) {
  SearchOptions options = small_search();
  options.plan.train.model = "DiT-XL/2";
  options.plan.train.depth = 0;
  options.plan.train.image_size = 512;
  options.plan.train.ema_decay = {0.99, 0.999, 0.9999};
  options.plan.gpus = 1;
  options.fixed = {"offload-optimizer"};
  const SearchResult result = search(options);
  EXPECT_TRUE(result.best.empty());
  EXPECT_THAT(result.problem, AllOf(StartsWith("nothing fits"), HasSubstr("RTX"), HasSubstr("kiln train"),
                                    Not(HasSubstr("\n"))));
  EXPECT_EQ(to_text(result), result.problem + "\n");
  EXPECT_TRUE(result.nearest.at(0).plan.fits);
  EXPECT_FALSE(to_json(result).at("fits"));
}

TEST(Search, CommandsAreComplete) {
  SearchOptions options = small_search();
  options.plan.steps = 1000;
  Plan plan = make_plan(options.plan);
  EXPECT_THAT(
      launch_command(plan),
      AllOf(StartsWith("kiln train --model DiT-B/2 "), HasSubstr(" --data store "), HasSubstr(" --out run "),
            HasSubstr(" --nproc 2"), HasSubstr(" --max-steps 1000"), HasSubstr(" --image-size 512")));
  options.plan.gpus = 16;
  plan = make_plan(options.plan);
  EXPECT_THAT(launch_command(plan),
              StartsWith("torchrun --no-python --nnodes 4 --nproc-per-node 4 --rdzv-backend c10d "
                         "--rdzv-endpoint HOST:29500 kiln train "));
  EXPECT_THAT(launch_command(plan), Not(HasSubstr("--nproc ")));
}

TEST(Search, RefusesLimitsWithoutEffect) {
  SearchOptions options = small_search();
  options.max_cost = 10;
  EXPECT_THAT([&] { search(options); }, ThrowsMessage<Error>(HasSubstr("--price-per-gpu-hour")));
  options.max_cost = 0;
  options.deadline_days = -1;
  EXPECT_THAT([&] { search(options); }, ThrowsMessage<Error>(HasSubstr("--deadline-days")));
  options = small_search();
  options.plan.gpus = 3;
  EXPECT_THAT([&] { search(options); }, ThrowsMessage<Error>(HasSubstr("255 and 258")));
}

}  // namespace
}  // namespace kiln
