// A block of DiT hands its last branch on, and the next one adds it in the pass of its own norm: fewer
// passes, the same bits.
#include <map>
#include <string>

#include "ops/op_recorder.h"
#include "train/placements.h"

namespace kiln::test {
namespace {

TinyOptions handing_on(TinyOptions options) {
  options.op_choices.hand_on_branch = true;
  return options;
}

void expect_same_training(const TinyOptions& options) {
  const Outcome apart = train(options, 4, 3), handed_on = train(handing_on(options), 4, 3);
  EXPECT_EQ(handed_on.losses, apart.losses);
  expect_equal(handed_on.state, apart.state);
}

TEST(HandedOnBranch, TrainsToTheSameBits) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    expect_same_training({.compute_dtype = dtype});
    expect_same_training({.compute_dtype = dtype, .micro_batch = 2, .depth = 3});
    expect_same_training(
        {.compute_dtype = dtype, .memory = std::vector<MemoryChoice>(4, {Activations::kRecompute})});
  }
}

// A loss that taps a block wants the whole of its output.
TEST(HandedOnBranch, StaysWhereALossTapsOrActivationsWaitOnTheHost) {
  expect_same_training({.objective = "epsilon", .align_weight = 0.5});
  std::vector<MemoryChoice> memory(4);
  memory[2].activations = Activations::kOffload;
  expect_same_training({.memory = memory});
}

std::map<std::string, int> operations_of(const TinyOptions& options) {
  const TinyTraining tiny(options);
  OpRecorder recorder(/*timed=*/false);
  tiny.step->run(tiny.batch(2), 1e-3);
  std::map<std::string, int> counts;
  for (const OpRecord& op : recorder.take()) ++counts[op.name];
  return counts;
}

TEST(HandedOnBranch, TakesFewerPasses) {
  std::map<std::string, int> apart = operations_of({}), handed_on = operations_of(handing_on({}));
  EXPECT_EQ(apart["kiln::gated_residual"], 2);
  EXPECT_EQ(apart["kiln::gated_residual_adaln"], 2);
  EXPECT_EQ(apart["kiln::adaln_modulate"], 3);  // two blocks and the final layer
  for (const std::string direction : {"", "_backward"}) {
    EXPECT_EQ(handed_on["kiln::gated_residual" + direction], 0);
    EXPECT_EQ(handed_on["kiln::gated_residual_adaln" + direction], 4);
    EXPECT_EQ(handed_on["kiln::adaln_modulate" + direction], 1);
  }
}

}  // namespace
}  // namespace kiln::test
