// The scale of an update as the device computes it, against what the host would.
#include <cmath>
#include <limits>

#include "ops/checks.h"

namespace kiln::ops {
namespace {

double scale_of(double sum_of_squares, double max_grad_norm, double loss_scale, const at::Tensor& losses) {
  return step_scale(at::scalar_tensor(sum_of_squares, at::kDouble), losses, max_grad_norm, loss_scale)
      .item<float>();
}

TEST(StepScale, ClipsByTheNormOfUnscaledGradients) {
  const at::Tensor losses = at::ones({3}, at::kDouble);
  for (const double sum : {1e-12, 4.0, 81.0, 1e30})
    for (const double limit : {0.0, 0.5, 4.0})
      for (const double loss_scale : {1.0, 65536.0}) {
        const double norm = std::sqrt(sum) / loss_scale;
        const double clip = limit > 0 ? std::min(1.0, limit / (norm + 1e-6)) : 1;
        EXPECT_EQ(scale_of(sum, limit, loss_scale, losses), static_cast<float>(clip / loss_scale));
      }
}

TEST(StepScale, IsNanWhereAStepIsSkipped) {
  const double inf = std::numeric_limits<double>::infinity(), nan = std::nan("");
  const at::Tensor losses = at::ones({3}, at::kDouble);
  EXPECT_TRUE(std::isnan(scale_of(inf, 1, 1, losses)));
  EXPECT_TRUE(std::isnan(scale_of(nan, 0, 1, losses)));
  EXPECT_TRUE(std::isnan(scale_of(1, 1, 1, at::tensor({1.0, inf}))));
}

TEST(StepScale, AdamwReadsIt) {
  const auto run = [](double scale, const at::Tensor& on_device) {
    at::Tensor master = randn({100}, at::kFloat, 1), m = at::zeros({100}), v = at::zeros({100});
    std::vector<EmaSlice> emas{{at::zeros({100}), 0.5}};
    AdamWStep options = adamw_options(scale, 1);
    options.lr = 0.1;
    options.beta2 = 0.99;
    options.device_scale = on_device;
    adamw_ema_step_(master, randn({100}, at::kFloat, 2), m, v, emas, nullptr, options);
    return Tensors{master, m, v, emas[0].weights};
  };
  const Tensors given = run(0.25, {}), read = run(1, at::full({}, 0.25)),
                skipped = run(1, at::full({}, std::nan("")));
  expect_same_bits(given, read);
  EXPECT_TRUE(at::equal(skipped[0], randn({100}, at::kFloat, 1)));
  EXPECT_TRUE(at::equal(skipped[3], at::zeros({100})));
}

}  // namespace
}  // namespace kiln::ops
