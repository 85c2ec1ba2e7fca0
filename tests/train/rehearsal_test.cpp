// A walk before the first step takes the memory of a step and leaves no trace, wherever the state is.

#include "parallel/rank_threads.h"
#include "train/placements.h"

namespace kiln {
namespace {

struct Course {
  int64_t world_size, stage;
  Placement state = Placement::kDevice, weights = Placement::kDevice;
};

TEST(Rehearsal, ChangesNothing) {
  constexpr int64_t kBatch = 5, kSteps = 3;
  constexpr Course kSettings[] = {{1, 0},
                                  {1, 0, Placement::kNvme},
                                  {1, 3, Placement::kNvme, Placement::kNvme},
                                  {2, 0},
                                  {2, 1, Placement::kNvme},
                                  {2, 2},
                                  {2, 2, Placement::kNvme},
                                  {2, 3},
                                  {2, 3, Placement::kNvme, Placement::kNvme}};
  for (const int64_t ranks : {1, 2})
    test::on_ranks(ranks, [&](const std::shared_ptr<ProcessGroup>& group) {
      for (const auto& [world_size, stage, state, weights] : kSettings) {
        if (world_size != ranks) continue;
        test::TinyOptions options =
            test::placed({.micro_batch = 2, .group = group, .zero = {.stage = stage}}, state, weights);
        const test::Outcome plain = test::train(options, kBatch, kSteps);
        const test::TinyTraining rehearsed(options);
        const StepBatch batch = rehearsed.batch(kBatch, /*seed=*/77);
        rehearsed.step->rehearse(test::rows_of(batch, *group));
        const test::Outcome outcome = test::take_steps(rehearsed, kBatch, 0, kSteps);
        EXPECT_EQ(outcome.losses, plain.losses) << world_size << " ranks, stage " << stage;
        test::expect_equal(outcome.state, plain.state);
      }
    });
}

}  // namespace
}  // namespace kiln
