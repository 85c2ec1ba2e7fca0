// Building model and training state: what it holds at once, planned and measured.

#include "core/allocations.h"
#include "plan/trace/phases.h"
#include "plan/trace/trace.h"
#include "run/option_values.h"
#include "test_files.h"
#include "train/usable_options.h"

namespace kiln {
namespace {

// Many small segments: 4 M weights.
TrainOptions deep_options() {
  TrainOptions options = test::tiny_dit_options();
  options.model.depth = 96;
  return options;
}

int64_t planned_peak(const TrainOptions& options, DryRunDevice device, int64_t world_size = 1) {
  return peak_bytes(trace_load(options, synthetic_shape(options), device, dry_group(world_size)));
}

struct Built {
  int64_t peak_bytes = 0, num_weights = 0;
};

Built build(const TrainOptions& options) {
  install_tracking_cpu_allocator();
  const int64_t before = live_cpu_bytes().live;
  reset_peak_cpu_bytes();
  const Training training = build_training(options, synthetic_shape(options), at::kCPU);
  Built built{.peak_bytes = live_cpu_bytes().peak - before};
  for (const auto& segment : training.state->segments) built.num_weights += segment.unit.layout().size;
  return built;
}

TEST(Load, HoldsWhatThePlanSays) {
  for (const char* dtype : {"f32", "bf16"}) {
    TrainOptions options = deep_options();
    set_option(options, "compute-dtype", dtype);
    const auto planned = static_cast<double>(planned_peak(options, DryRunDevice::kCpu));
    EXPECT_NEAR(static_cast<double>(build(options).peak_bytes), planned, 0.001 * planned) << dtype;
  }
}

// A plan needs no file, and reading one holds no more.
TEST(Load, IsPlannedWithoutTheFileOfItsWeights) {
  TrainOptions options = deep_options();
  const int64_t fresh = planned_peak(options, DryRunDevice::kCuda);
  options.model.weights = "/not here.safetensors";
  EXPECT_EQ(planned_peak(options, DryRunDevice::kCuda), fresh);
}

// Weights come one by one: a model larger than the device's memory can be divided among devices, or put on a
// disk.
TEST(Load, NeverHoldsTheWholeModelWhereTheStateIsElsewhere) {
  const test::TempFolder folder;
  TrainOptions options = deep_options();
  options.zero.stage = 3;
  options.offload.optimizer = options.offload.params = Placement::kNvme;
  options.offload.nvme.folder = folder.path();
  options.compute.dtype = at::kBFloat16;  // whose gradients are 2 bytes a weight
  const Built built = build(options);
  const int64_t model_bytes = 4 * built.num_weights;
  EXPECT_LT(built.peak_bytes, model_bytes * 3 / 4);
  const auto planned = static_cast<double>(planned_peak(options, DryRunDevice::kCpu));
  EXPECT_NEAR(static_cast<double>(built.peak_bytes), planned, 0.02 * planned);

  options.offload.optimizer = options.offload.params = Placement::kDevice;
  options.global_batch = 16;
  EXPECT_LT(planned_peak(options, DryRunDevice::kCuda, /*world_size=*/16), model_bytes / 2);
}

}  // namespace
}  // namespace kiln
