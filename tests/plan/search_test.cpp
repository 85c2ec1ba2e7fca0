// The search against plans of every configuration, one by one.
#include "plan/search/search.h"

#include <cmath>
#include <cstdlib>
#include <limits>
#include <set>
#include <tuple>

#include "plan/memory/plan_memory.h"
#include "plan/plan_settings.h"
#include "plan/ranks/rank_step.h"
#include "plan/ranks/step_time.h"
#include "test_files.h"

namespace kiln {
namespace {

SearchOptions search_of(const std::string& gpu, int64_t gpus, const nlohmann::json& settings,
                        std::set<std::string> fixed = {}) {
  return {.plan = test::plan_options(gpu, gpus, settings), .fixed = std::move(fixed)};
}

// Small, on a GPU whose memory is between what the configurations need.
SearchOptions small_search() {
  return search_of("T4", 2, {{"model", "DiT-B/2"}, {"depth", 4}, {"image-size", 512}}, {"offload-optimizer"});
}

// On one GPU, whose optimizer may wait on the host.
SearchOptions search_alone() {
  return search_of("T4", 1, {{"model", "DiT-L/4"}, {"depth", 8}, {"global-batch", 64}});
}

// Batches of which the last pass is a rest, over slow links between machines.
SearchOptions search_with_rests() {
  return search_of(
      "RTX-4090", 8,
      settings("model=DiT-B/4 depth=3 global-batch=216 compute-dtype=bf16 ema-decay=[0.999,0.9999]"),
      {"compute-dtype"});
}

// Weights that fit nowhere but on the host.
SearchOptions search_with_large_weights() {
  return search_of("T4", 1,
                   settings("model=dit hidden-size=4096 num-heads=32 patch-size=2 depth=11 global-batch=64 "
                            "compute-dtype=fp16"),
                   {"compute-dtype", "micro-batch"});
}

SearchOptions search_on_cpu() {
  return search_of("cpu", 1, {{"model", "DiT-S/4"}, {"depth", 3}, {"global-batch", 48}});
}

// Two plans are as good when they are equal in what is asked for.
struct Best {
  double step_s = std::numeric_limits<double>::infinity(), gpu_s = step_s;
  std::pair<double, double> least_memory{step_s, step_s};  // steps of 256 MiB; and then the fastest
};

constexpr double kToldApart = 256 << 20;

// Live bytes, context and communication: what a device must have.
double least_bytes(const Plan& plan) {
  int64_t bytes = plan.peak_bytes;
  for (const auto& [name, overhead] : plan.overhead)
    if (name != "allocator") bytes += overhead;
  return static_cast<double>(bytes);
}

// A configuration planned for itself: what a search looks at. KILN_FULL=1: all that kiln plan says.
Plan planned_for_itself(const PlanOptions& options) {
  if (std::getenv("KILN_FULL")) return make_plan(options);
  Plan plan;
  plan.options = options;
  plan.machine = planned_machine(options);
  check_plan(options, plan.machine);
  const DataDescription data = describe(options.train);
  const Sharding sharding = sharding_of(options.train, options.gpus, plan.machine);
  StepTrace trace =
      trace_step(options.train, data.shape, plan.machine.device, options.gpus, sharding.ranks_per_node);
  if (!is_of(trace, sharding)) trace = trace_of_rank(trace, sharding);
  static_cast<MemoryPlan&>(plan) = plan_memory(plan.machine, data, /*validation_images=*/0, trace);
  plan.step_s = time_step(trace, plan.machine, sharding).seconds;
  return plan;
}

// The configurations in which two values come together for the first time, and those that screening does not
// put behind what the search has chosen. KILN_FULL=1: all.
std::vector<Configuration> planned_ones(const std::vector<Configuration>& all, const SearchResult& result) {
  if (std::getenv("KILN_FULL")) return all;
  Best chosen;
  for (const SearchChoice& choice : result.best) {
    chosen.step_s = std::min(chosen.step_s, choice.plan.step_s);
    chosen.least_memory =
        std::min(chosen.least_memory, {std::ceil(least_bytes(choice.plan) / kToldApart), choice.plan.step_s});
  }
  std::set<std::tuple<size_t, int64_t, size_t, int64_t>> pairs;
  const auto has_new_pair = [&](const Configuration& c) {
    const int64_t values[] = {static_cast<int64_t>(c.compute_dtype),
                              c.micro_batch,
                              c.zero_stage,
                              static_cast<int64_t>(c.offload.optimizer),
                              static_cast<int64_t>(c.offload.params),
                              c.recompute.is_none()  ? 0
                              : c.recompute.is_all() ? 2
                                                     : 1,
                              c.offload_activations.is_none()};
    bool is_new = false;
    for (size_t i = 0; i < std::size(values); ++i)
      for (size_t j = i + 1; j < std::size(values); ++j)
        is_new |= pairs.emplace(i, values[i], j, values[j]).second;
    return is_new;
  };
  const auto may_win = [&](const Configuration& c) {
    constexpr double kNear = 1.01;  // ten times what screening and a plan may differ by
    const double memory = std::ceil(static_cast<double>(c.least_bytes) / kNear / kToldApart);
    return c.step_s > 0 && (c.step_s <= kNear * chosen.step_s ||
                            std::pair(memory, c.step_s) <=
                                std::pair(chosen.least_memory.first, kNear * chosen.least_memory.second));
  };
  std::vector<Configuration> ones;
  for (const Configuration& configuration : all) {
    const bool is_covering = has_new_pair(configuration);
    if (is_covering || may_win(configuration)) ones.push_back(configuration);
  }
  return ones;
}

class SearchOf : public ::testing::TestWithParam<SearchOptions (*)()> {};

TEST_P(SearchOf, FindsWhatPlanningEveryConfigurationFinds) {
  const SearchOptions options = GetParam()();
  const SearchResult result = search(options);
  const MachineProfile machine = planned_machine(options.plan);
  const std::vector<Configuration> all = configurations(options, machine, describe(options.plan.train));
  EXPECT_EQ(all.size(), result.num_configurations);

  Best with_room, with_little_room, within_memory;
  for (const Configuration& configuration : planned_ones(all, result)) {
    const Plan plan = planned_for_itself(options_of(options, configuration));
    SCOPED_TRACE(launch_command(plan));
    const double least = least_bytes(plan);
    EXPECT_NEAR(static_cast<double>(configuration.least_bytes), least, 1e-4 * least);
    if (configuration.step_s > 0) {
      EXPECT_NEAR(configuration.step_s, plan.step_s, 1e-3 * plan.step_s);
    }
    if (!plan.fits) continue;
    for (const auto& [best, share] : {std::pair{&with_room, options.memory_share},
                                      {&with_little_room, kFullShare},
                                      {&within_memory, 1.0}}) {
      if (plan.needed_bytes > share * static_cast<double>(machine.memory_bytes)) continue;
      best->step_s = std::min(best->step_s, plan.step_s);
      best->gpu_s = std::min(best->gpu_s, static_cast<double>(plan.options.gpus) * plan.step_s);
      best->least_memory = std::min(best->least_memory, {std::ceil(least / kToldApart), plan.step_s});
    }
  }
  const Best& best = std::isfinite(with_room.step_s)          ? with_room
                     : std::isfinite(with_little_room.step_s) ? with_little_room
                                                              : within_memory;
  ASSERT_FALSE(result.best.empty());
  for (const SearchChoice& choice : result.best) {
    const Plan& plan = choice.plan;
    EXPECT_TRUE(plan.fits) << choice.goal;
    const Plan again = make_plan(plan.options);
    EXPECT_EQ(plan.step_s, again.step_s) << choice.goal;
    EXPECT_EQ(plan.needed_bytes, again.needed_bytes) << choice.goal;
    if (choice.goal.find("fastest") != std::string::npos) {
      EXPECT_EQ(plan.step_s, best.step_s);
    }
    if (choice.goal.find("cheapest") != std::string::npos) {
      EXPECT_EQ(static_cast<double>(plan.options.gpus) * plan.step_s, best.gpu_s);
    }
    if (choice.goal.find("least memory") != std::string::npos) {
      EXPECT_EQ(std::ceil(least_bytes(plan) / kToldApart), best.least_memory.first);
      EXPECT_EQ(plan.step_s, best.least_memory.second);
    }
  }
}

std::string name_of_case(const ::testing::TestParamInfo<SearchOptions (*)()>& info) {
  constexpr const char* kNames[] = {"two", "alone", "rests", "large", "cpu"};
  return kNames[info.index];
}

INSTANTIATE_TEST_SUITE_P(Cases, SearchOf,
                         ::testing::Values(small_search, search_alone, search_with_rests,
                                           search_with_large_weights, search_on_cpu),
                         name_of_case);

// The test above tests little where everything fits, or nothing is mixed.
TEST(Search, HasWhatDoesNotFitAndMixtures) {
  const SearchOptions options = small_search();
  const MachineProfile machine = planned_machine(options.plan);
  int64_t num_large = 0, num_mixtures = 0;
  for (const Configuration& c : configurations(options, machine, describe(options.plan.train))) {
    num_large += c.step_s == 0;
    num_mixtures += !c.recompute.is_none() && !c.recompute.is_all();
  }
  EXPECT_GT(num_large, 0);
  EXPECT_GT(num_mixtures, 0);
}

TEST(Search, OffloadsWeightsAndActivationsWhereNothingElseFits) {
  SearchOptions options = search_with_large_weights();
  const SearchResult result = search(options);
  ASSERT_FALSE(result.best.empty());
  EXPECT_NE(result.best[0].plan.options.train.offload.params, Placement::kDevice);
  options.fixed.insert({"offload-params", "offload-activations"});
  EXPECT_TRUE(search(options).best.empty());

  options = small_search();
  options.fixed = {"offload-optimizer", "zero-stage", "recompute"};
  const MachineProfile machine = planned_machine(options.plan);
  const DataDescription data = describe(options.plan.train);
  const auto offloading = [&] {
    int64_t count = 0;
    for (const Configuration& c : configurations(options, machine, data))
      if (!c.offload_activations.is_none()) {
        ++count;
        EXPECT_LT(c.least_bytes, configurations(options, machine, data).front().least_bytes);
      }
    return count;
  };
  EXPECT_EQ(offloading(), 0) << "what is recomputed is given";
  options.fixed.erase("recompute");
  options.plan.gpus = 1;
  EXPECT_GT(offloading(), 0) << "the whole batch in one pass";
}

// Without GELU's results nothing has to be recomputed in the smaller memory.
TEST(Search, KeepsGeluWhereMemoryIsFree) {
  SearchOptions options =
      search_of("H200", 1, settings("model=DiT-B/2 global-batch=64 compute-dtype=bf16 untried-gpu=all"),
                {"compute-dtype", "micro-batch", "offload-optimizer", "zero-stage", "offload-activations"});
  const auto keeps_gelu = [&] {
    const SearchResult result = search(options);
    EXPECT_FALSE(result.best.empty());
    return result.best.at(0).plan.options.train.compute.untried_gpu.has(Untried::kKeepGelu);
  };
  EXPECT_TRUE(keeps_gelu());
  options.plan.gpu_memory = std::to_string(make_plan(options.plan).needed_bytes);
  options.memory_share = 0.95;
  EXPECT_FALSE(keeps_gelu());
}

TEST(Search, KeepsWhatIsGiven) {
  SearchOptions options =
      search_of("T4", 2,
                settings("model=DiT-B/2 depth=4 image-size=512 compute-dtype=fp16 micro-batch=16 "
                         "recompute=all zero-stage=2 offload-optimizer=cpu"));
  for (const char* name : kSearchedOptions) options.fixed.insert(name);
  const SearchResult result = search(options);
  EXPECT_EQ(result.num_configurations, 1);
  ASSERT_EQ(result.best.size(), 1);
  EXPECT_EQ(result.best[0].goal, "fastest that fits, cheapest, least memory");
  const Plan plan = make_plan(options.plan);
  EXPECT_DOUBLE_EQ(result.best[0].plan.step_s, plan.step_s);
  EXPECT_EQ(result.best[0].plan.needed_bytes, plan.needed_bytes);
  EXPECT_TRUE(result.by_gpus.empty());  // of one number of GPUs there is nothing to compare
}

TEST(Search, MeetsItsLimitsOrSaysWhatIsNearest) {
  SearchOptions options = small_search();
  options.plan.train = changed(options.plan.train, "global-batch=32 compute-dtype=fp16");
  options.fixed.insert("compute-dtype");
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

// A recipe says it for one GPU; a search tries many.
TEST(Search, PassesAreNoLargerThanWhatAGpuHas) {
  SearchOptions options =
      search_of("T4", 1, {{"model", "DiT-S/8"}, {"global-batch", 64}, {"micro-batch", 64}, {"zero-stage", 1}},
                {"micro-batch", "zero-stage", "compute-dtype", "offload-optimizer"});
  options.any_gpus = true;
  const SearchResult result = search(options);
  ASSERT_FALSE(result.by_gpus.empty());
  for (const SearchChoice& choice : result.by_gpus)
    EXPECT_EQ(choice.plan.micro_batch, 64 / choice.plan.options.gpus);
}

TEST(Search, SaysOnWhatItWouldFit) {
  const SearchOptions options =
      search_of("T4", 1,
                settings("model=DiT-XL/2 image-size=512 global-batch=4 compute-dtype=fp16 "
                         "ema-decay=[0.99,0.999,0.9999]"),
                {"compute-dtype", "offload-optimizer"});
  const SearchResult result = search(options);
  EXPECT_TRUE(result.best.empty());
  EXPECT_THAT(result.problem, AllOf(StartsWith("nothing fits"), HasSubstr("on 1 x L4 it fits"),
                                    HasSubstr("kiln train"), Not(HasSubstr("\n"))));
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
  plan.options.gpus = 6;  // as many on each node, 4 at most
  EXPECT_THAT(launch_command(plan), HasSubstr("--nnodes 2 --nproc-per-node 3 "));
  plan.machine.device = DryRunDevice::kCpu;
  EXPECT_THAT(launch_command(plan), AllOf(StartsWith("kiln train"), HasSubstr(" --nproc 6")));
}

TEST(Search, RefusesLimitsWithoutEffect) {
  SearchOptions options = small_search();
  options.max_cost = 10;
  EXPECT_ERROR(search(options), "--price-per-gpu-hour");
  options.max_cost = 0;
  options.deadline_days = -1;
  EXPECT_ERROR(search(options), "--deadline-days");
  options = small_search();
  options.plan.gpus = 3;
  EXPECT_ERROR(search(options), "--global-batch 255, or --global-batch 258");
}

}  // namespace
}  // namespace kiln
