// Training with products in fp8, emulated on the CPU: the loss goes where bf16's goes.

#include <cstdlib>

#include "train/tiny_model.h"

namespace kiln::test {
namespace {

constexpr int64_t kWidth = 288;  // a multiple of 3 heads and of 16, long enough for fp8
constexpr int kSteps = 24;

struct Curve {
  std::vector<double> losses, grad_norms;
};

Curve train(ops::Products products, int num_steps = kSteps, const std::vector<MemoryChoice>& memory = {}) {
  const TinyTraining tiny({.compute_dtype = at::kBFloat16,
                           .max_grad_norm = 1,
                           .memory = memory,
                           .hidden_size = kWidth,
                           .products = products});
  const StepBatch batch = tiny.batch(16);  // 256 rows of tokens
  Curve curve;
  for (int step = 0; step < num_steps; ++step) {
    const StepResult result = tiny.step->run(batch, /*lr=*/1e-3);
    curve.losses.push_back(result.loss);
    curve.grad_norms.push_back(result.grad_norm);
  }
  return curve;
}

TEST(Fp8Training, FollowsTheLossOfBf16) {
  const Curve bf16 = train(ops::Products::kComputeDtype), fp8 = train(ops::Products::kFp8);
  EXPECT_NE(bf16.losses, fp8.losses) << "nothing ran in fp8";
  EXPECT_LT(bf16.losses.back(), 0.8 * bf16.losses.front()) << "these steps teach nothing";
  const double fallen = bf16.losses.front() - bf16.losses.back();
  for (int step = 0; step < kSteps; ++step)
    EXPECT_NEAR(fp8.losses[step], bf16.losses[step], 0.1 * fallen + 0.02 * bf16.losses[step])
        << "step " << step;
  EXPECT_NEAR(fp8.grad_norms.front(), bf16.grad_norms.front(), 0.05 * bf16.grad_norms.front());
}

TEST(Fp8Training, RecomputingGivesTheSameBits) {
  const MemoryChoice recompute{.activations = Activations::kRecompute};
  const int num_steps = std::getenv("KILN_FULL") ? kSteps : 4;  // scales are of the values of each step alone
  const Curve kept = train(ops::Products::kFp8, num_steps),
              recomputed =
                  train(ops::Products::kFp8, num_steps, {recompute, recompute, recompute, recompute});
  EXPECT_EQ(kept.losses, recomputed.losses);
  EXPECT_EQ(kept.grad_norms, recomputed.grad_norms);
}

}  // namespace
}  // namespace kiln::test
