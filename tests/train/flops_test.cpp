#include <gtest/gtest.h>

#include "core/aten.h"
#include "train/settings.h"
#include "train/setup.h"

namespace kiln {
namespace {

Training training_of(const TrainOptions& options) {
  return build_training(options, synthetic_shape(options), at::kMeta);
}

// Shares of the peak count the pictures and captions that a step has, not the largest that the model takes.
TEST(FlopsOfStep, AreThoseOfItsPicturesAndCaptions) {
  TrainOptions options = changed({}, "model=PixArt-Sigma-XL/2-1024 depth=2");
  const Training training = training_of(options);
  const auto meta = at::TensorOptions(at::kMeta);
  StepBatch batch;
  batch.x_0 = at::empty({3, 4, 32, 16}, meta);
  batch.global_batch = 6;
  batch.conditioning.text.rows = at::empty({12, 4096}, meta);
  batch.conditioning.text.host_offsets = {0, 2, 5, 12};
  const double flops = flops_of_step(training, batch);
  EXPECT_DOUBLE_EQ(flops, 6 * flops_of_image(training, {32, 16, 4}));
  const double native = flops_of_image(training, training.denoiser->shape().native_extent());
  EXPECT_GT(native, 30 * flops / 6);

  const auto at_rows = [&](double rows) { return flops_of_image(training, {32, 32, rows}); };
  EXPECT_NEAR(at_rows(20) - at_rows(10), at_rows(10) - at_rows(0), 1e-9 * at_rows(20));

  options.lora.rank = 4;
  EXPECT_DOUBLE_EQ(3 * flops_of_step(training_of(options), batch), 2 * flops)
      << "no gradients of the weights";
}

}  // namespace
}  // namespace kiln
