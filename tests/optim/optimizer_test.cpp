#include "optim/optimizer.h"
#include "core/aten.h"

#include <cmath>

#include "optim/grad_norm.h"
#include "test_files.h"

namespace kiln {
namespace {

TEST(OptimizerRegistry, ListsWhatIsTestedHere) {
  EXPECT_THAT(optimizer_names(), ElementsAre("adamw", "adamw-8bit", "came", "came-sana"));
}

TEST(OptimizerRegistry, RefusesUnknownNamesKeysAndValues) {
  EXPECT_ERROR(make_optimizer({{"type", "lion"}}), "adamw");
  EXPECT_ERROR(make_optimizer({{"type", "adamw"}, {"momentum", 0.9}}), "momentum");
  EXPECT_ERROR(make_optimizer({{"type", "adamw"}, {"betas", {0.9, 1.0}}}), "betas");
  EXPECT_ERROR(make_optimizer({{"type", "adamw"}, {"eps", -1}}), "eps");
  EXPECT_ERROR(make_optimizer({{"type", "adamw"}, {"weight_decay", -1}}), "weight_decay");
}

// Two updates against Loshchilov & Hutter's equations in f64.
TEST(AdamW, FollowsItsEquations) {
  const double lr = 0.01, beta1 = 0.8, beta2 = 0.9, eps = 1e-3, decay = 0.1;
  const auto optimizer =
      make_optimizer({{"type", "adamw"}, {"betas", {beta1, beta2}}, {"eps", eps}, {"weight_decay", decay}});
  OptimizerSlice slice{
      .master = at::full({3}, 2.0f), .grads = at::zeros({3}), .moments = {at::zeros({3}), at::zeros({3})}};
  double p = 2, m = 0, v = 0;
  for (int64_t update = 1; update <= 2; ++update) {
    const double grad = update == 1 ? 0.5 : -1.5, scale = 0.25;
    slice.grads.fill_(grad / scale);
    optimizer->step(slice, {.lr = lr, .update = update, .grad_scale = scale});
    m = beta1 * m + (1 - beta1) * grad;
    v = beta2 * v + (1 - beta2) * grad * grad;
    const double m_hat = m / (1 - std::pow(beta1, update)), v_hat = v / (1 - std::pow(beta2, update));
    p = p * (1 - lr * decay) - lr * m_hat / (std::sqrt(v_hat) + eps);
    EXPECT_NEAR(slice.master[1].item<double>(), p, 1e-6);
  }
}

TEST(GradNorm, SpansAllBuffersAndClipsAsTorchDoes) {
  const at::Tensor sum = global_sum_of_squares({at::full({4}, 1.0f), at::full({3}, 2.0f).to(at::kBFloat16)});
  EXPECT_DOUBLE_EQ(sum.item<double>(), 16);
  EXPECT_DOUBLE_EQ(clip_coefficient(4, 1), 1 / (4 + 1e-6));
  EXPECT_DOUBLE_EQ(clip_coefficient(0.5, 1), 1);
  EXPECT_DOUBLE_EQ(clip_coefficient(4, 0), 1);  // off
}

}  // namespace
}  // namespace kiln
