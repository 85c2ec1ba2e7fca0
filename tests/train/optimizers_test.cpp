// Every optimizer trains the same however its state is divided, saved and loaded.

#include <mutex>

#include "checkpoint/tensor_files.h"
#include "parallel/rank_threads.h"
#include "test_files.h"
#include "train/checkpoints.h"
#include "train/placements.h"

namespace kiln {
namespace {

using test::TinyOptions, test::TinyTraining;

constexpr int64_t kBatch = 4;

// Tensors of every rank, with matrices of one row, of one column, and smaller than a slice.
FlatLayout odd_layout(const Optimizer& optimizer) {
  FlatLayout layout{.slots = {}, .size = 0, .alignment = optimizer.alignment()};
  const std::vector<std::vector<int64_t>> shapes = {{37, 29},     {53},    {12, 1, 3, 3}, {9, 17, 1, 1},
                                                    {5, 6, 3, 3}, {},      {1, 6, 48},    {64, 70},
                                                    {1, 40},      {40, 1}, {3, 67, 5},    {700}};
  for (size_t i = 0; i < shapes.size(); ++i) layout.add(fmt::format("tensor.{}", i), shapes[i]);
  return layout;
}

// The weights after some steps on one of the ranks, of its slice.
at::Tensor weights_of_slice(const Optimizer& optimizer, ProcessGroup& group) {
  const FlatLayout layout = odd_layout(optimizer);
  FlatUnit unit("unit", layout,
                {.moments = optimizer.state(layout),
                 .num_emas = 1,
                 .sharding = {.zero_stage = 1, .rank = group.rank(), .world_size = group.world_size()}});
  at::Generator generator = at::detail::createCPUGenerator(3);
  const auto fill = [&](at::Tensor buffer) {
    for (size_t i = 0; i < layout.slots.size(); ++i)
      unit.write(buffer, i, at::randn(layout.slots[i].shape, generator));
  };
  fill(unit.master);
  unit.start_emas();
  OptimizerSlice slice{.master = unit.master,
                       .grads = at::zeros({unit.shard_size()}),
                       .moments = unit.moments,
                       .emas = {{unit.emas[0], 0.9}},
                       .layout = &layout,
                       .offset = unit.shard_offset()};
  if (group.world_size() > 1)
    slice.sum = [&](at::Tensor& values) { group.all_reduce(values, "the sums").wait(); };
  for (int64_t update = 1; update <= 4; ++update) {
    fill(slice.grads);
    optimizer.step(slice, {.lr = 0.01, .update = update, .grad_scale = 0.5});
  }
  const at::Tensor all = at::empty({unit.size()});
  group.all_gather(all, unit.master, "the weights").wait();
  return all.narrow(0, 0, layout.size).clone();
}

class Optimizers : public ::testing::TestWithParam<std::string> {
 protected:
  TinyOptions options(const std::shared_ptr<ProcessGroup>& group = std::make_shared<ProcessGroup>(),
                      int64_t stage = 0) const {
    TinyOptions options{
        .max_grad_norm = 0.1, .objective = "epsilon", .group = group, .zero = {.stage = stage}};
    options.optimizer_config = {{"type", GetParam()}, {"weight_decay", 0.01}};
    return options;
  }
  // KILN_FULL=1: every stage. Else two for each number of ranks; on several, each optimizer meets all of
  // them.
  bool comes(int64_t world_size, int64_t stage) const {
    return std::getenv("KILN_FULL") || (number() + world_size + stage) % 2 == 0;
  }
  // Else one place for each of these.
  bool comes(int64_t world_size, int64_t stage, Placement placement) const {
    const bool is_on_disk = (number() / 2 + world_size / 2 + stage / 2) % 2 == 1;
    return comes(world_size, stage) &&
           (std::getenv("KILN_FULL") || is_on_disk == (placement == Placement::kNvme));
  }

 private:
  static int64_t number() {
    const std::vector<std::string> names = optimizer_names();
    return std::ranges::find(names, GetParam()) - names.begin();
  }
};

TEST_P(Optimizers, SlicesMoveWeightsAsTheWholeDoes) {
  const auto optimizer = make_optimizer({{"type", GetParam()}, {"weight_decay", 0.1}});
  ProcessGroup alone;
  const at::Tensor expected = weights_of_slice(*optimizer, alone);
  for (const int64_t world_size : {2, 3, 4, 7})
    test::on_ranks(world_size, [&](const std::shared_ptr<ProcessGroup>& group) {
      const at::Tensor weights = weights_of_slice(*optimizer, *group);
      EXPECT_LE(((weights - expected).norm() / expected.norm()).item<double>(), 1e-6) << world_size;
    });
}

// On any ranks, at any stage, with its state on a disk.
TEST_P(Optimizers, RanksTrainWhatOneTrains) {
  const int64_t num_steps = std::getenv("KILN_FULL") ? 6 : 4;
  const test::Outcome expected = test::train(options(), kBatch, num_steps);
  for (const int64_t world_size : {1, 2, 3, 4})
    test::on_ranks(world_size, [&](const std::shared_ptr<ProcessGroup>& group) {
      for (int64_t stage = 0; stage <= 3; ++stage)
        for (const Placement placement : {Placement::kDevice, Placement::kNvme}) {
          if (!comes(world_size, stage, placement)) continue;
          const test::Outcome outcome =
              test::train(test::placed(options(group, stage), placement), kBatch, num_steps);
          EXPECT_LE(test::worst_relative(outcome.losses, expected.losses), 1e-5)
              << world_size << " ranks, stage " << stage;
          if (world_size == 1) {
            EXPECT_EQ(outcome.losses, expected.losses) << "stage " << stage;
          }
        }
    });
}

std::map<std::string, at::Tensor> state_in(const std::string& folder) {
  return load_tensors(folder + "/" + kOptimizerFile);
}

// A checkpoint of one rank is loaded and saved again by every division: the same bits. Training goes on.
TEST_P(Optimizers, EveryDivisionResumes) {
  const test::TempFolder folder;
  const std::string run = folder.path().string();
  std::string saved;
  test::Outcome expected;
  {
    const TinyTraining tiny(options());
    test::take_steps(tiny, kBatch, 0, 3);
    saved = save_checkpoint(run, *tiny.state, {.step = 3});
    expected = test::take_steps(tiny, kBatch, 3, 6);
  }
  const std::map<std::string, at::Tensor> state = state_in(saved);
  for (const int64_t world_size : {1, 2, 3, 4})
    test::on_ranks(world_size, [&](const std::shared_ptr<ProcessGroup>& group) {
      for (int64_t stage = 0; stage <= 3; ++stage) {
        if (!comes(world_size, stage)) continue;
        const TinyTraining tiny(options(group, stage));
        load_checkpoint(saved, *tiny.state);
        const std::string again = save_checkpoint(run, *tiny.state, {.step = 10 + stage});
        if (group->rank() == 0) {
          const std::map<std::string, at::Tensor> found = state_in(again);
          EXPECT_EQ(found.size(), state.size());
          for (const auto& [key, values] : state) EXPECT_TRUE(at::equal(found.at(key), values)) << key;
        }
        const test::Outcome outcome = test::take_steps(tiny, kBatch, 3, 6);
        EXPECT_LE(test::worst_relative(outcome.losses, expected.losses), 1e-5)
            << world_size << " ranks, stage " << stage;
        if (world_size == 1) test::expect_equal(outcome.state, expected.state);
      }
    });
}

INSTANTIATE_TEST_SUITE_P(All, Optimizers, ::testing::ValuesIn(optimizer_names()), [](const auto& param) {
  std::string name = param.param;
  std::ranges::replace(name, '-', '_');
  return name;
});

}  // namespace
}  // namespace kiln
