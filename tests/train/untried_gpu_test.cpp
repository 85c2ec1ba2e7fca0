// --untried-gpu: what it changes, as far as a CPU shows it.
#include <gmock/gmock.h>

#include "core/dry_run.h"
#include "core/error.h"
#include "train/setup.h"
#include "train/usable_options.h"

namespace kiln {
namespace {

void build(DryRunDevice device) {
  TrainOptions options = test::tiny_dit_options();
  options.compute.untried_gpu = true;
  const DryRunScope dry_run(device);
  build_training(options, synthetic_shape(options), at::kMeta);
}

TEST(UntriedGpu, IsRefusedOnACpu) {
  EXPECT_THAT([] { build(DryRunDevice::kCpu); },
              testing::ThrowsMessage<Error>(testing::HasSubstr("--untried-gpu changes what a GPU does")));
  EXPECT_NO_THROW(build(DryRunDevice::kCuda));
}

}  // namespace
}  // namespace kiln
