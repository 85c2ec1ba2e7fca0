// Composed traces against the traces themselves.
#include "plan/trace_family.h"

#include <gtest/gtest.h>

namespace kiln {
namespace {

struct FamilySetting {
  const char* name;
  DryRunDevice device;
  const char *model, *dtype, *recompute;
};

class Composed : public ::testing::TestWithParam<FamilySetting> {};

TEST_P(Composed, EqualsTheTrace) {
  const FamilySetting& setting = GetParam();
  TrainOptions options;
  options.model = setting.model;
  options.depth = 3;
  options.compute_dtype = setting.dtype;
  options.recompute = setting.recompute;
  const DataShape data = synthetic_shape(options);
  TraceFamily family(options, data, setting.device, 64);
  for (const auto& [micro_batch, images] : {std::pair{1, 1}, {3, 3}, {8, 24}, {17, 51}, {32, 96}}) {
    TrainOptions traced = options;
    traced.micro_batch = micro_batch;
    traced.global_batch = images;
    const StepTrace expected = trace_step(traced, data, setting.device);
    const StepTrace& composed = family.at(micro_batch, images);
    SCOPED_TRACE(images);
    EXPECT_EQ(composed.memory.persistent_bytes, expected.memory.persistent_bytes);
    EXPECT_EQ(composed.memory.peak_bytes, expected.memory.peak_bytes);
    ASSERT_EQ(composed.memory.events.size(), expected.memory.events.size());
    for (size_t i = 0; i < expected.memory.events.size(); ++i)
      ASSERT_EQ(composed.memory.events[i].bytes, expected.memory.events[i].bytes) << i;
    ASSERT_EQ(composed.memory.marks.size(), expected.memory.marks.size());
    for (size_t i = 0; i < expected.memory.marks.size(); ++i) {
      const MemoryMark &mark = composed.memory.marks[i], &wanted = expected.memory.marks[i];
      EXPECT_EQ(mark.live_bytes, wanted.live_bytes) << i;
      // Of updates, which allocate nothing, the composed peak may leave out what is freed just before.
      if (mark.segment >= 0 && mark.phase != StepPhase::kOptimizer) {
        EXPECT_EQ(mark.peak_bytes, wanted.peak_bytes) << i;
      }
    }
    ASSERT_EQ(composed.ops.size(), expected.ops.size());
    for (size_t i = 0; i < expected.ops.size(); ++i) {
      const OpRecord &op = composed.ops[i], &wanted = expected.ops[i];
      ASSERT_EQ(op.name, wanted.name) << i;
      ASSERT_DOUBLE_EQ(op.flops, wanted.flops) << op.name;
      ASSERT_DOUBLE_EQ(op.bytes, wanted.bytes) << op.name;
      ASSERT_EQ(std::tie(op.m, op.n, op.k), std::tie(wanted.m, wanted.n, wanted.k)) << op.name;
    }
  }
}

// Two passes, several, many; and a rest of one image and of more.
TEST_P(Composed, HasThePassesOfTheTrace) {
  const FamilySetting& setting = GetParam();
  TrainOptions options;
  options.model = setting.model;
  options.depth = 2;
  options.compute_dtype = setting.dtype;
  options.recompute = setting.recompute;
  const DataShape data = synthetic_shape(options);
  TraceFamily family(options, data, setting.device, 64);
  for (const auto& [micro_batch, images] : {std::pair{8, 16}, {8, 40}, {8, 48}, {4, 100}, {5, 33}, {8, 25}}) {
    TrainOptions traced = options;
    traced.micro_batch = micro_batch;
    traced.global_batch = images;
    const StepTrace expected = trace_step(traced, data, setting.device);
    const StepTrace& composed = family.at(micro_batch, images);
    SCOPED_TRACE(fmt::format("{} in passes of {}", images, micro_batch));
    // Losses are left behind by every pass: a few bytes per image.
    EXPECT_NEAR(static_cast<double>(composed.memory.peak_bytes),
                static_cast<double>(expected.memory.peak_bytes), 64.0 * images);
    EXPECT_EQ(composed.memory.marks.size(), expected.memory.marks.size());
    ASSERT_EQ(composed.ops.size(), expected.ops.size());
    for (size_t i = 0; i < expected.ops.size(); ++i) {
      const OpRecord &op = composed.ops[i], &wanted = expected.ops[i];
      ASSERT_EQ(op.name, wanted.name) << i;
      ASSERT_EQ(op.times, wanted.times) << i << " " << op.name;
      ASSERT_DOUBLE_EQ(op.flops, wanted.flops) << op.name;
      if (op.name != "aten::cat") {  // of the losses
        ASSERT_DOUBLE_EQ(op.bytes, wanted.bytes) << i << " " << op.name;
      }
    }
  }
}

// Scratch of a CPU's half-precision products goes in steps.
TEST(TraceFamily, IsTheTraceWhereMemoryIsNotAffine) {
  TrainOptions options;
  options.model = "DiT-S/8";
  options.depth = 3;
  options.compute_dtype = "bf16";
  const DataShape data = synthetic_shape(options);
  TraceFamily family(options, data, DryRunDevice::kCpu, 64);
  for (int64_t images : {3, 8, 17, 40}) {
    TrainOptions traced = options;
    traced.global_batch = images;
    EXPECT_EQ(family.at(images, images).memory.peak_bytes,
              trace_step(traced, data, DryRunDevice::kCpu).memory.peak_bytes)
        << images;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Devices, Composed,
    ::testing::Values(FamilySetting{"cuda_bf16", DryRunDevice::kCuda, "DiT-S/4", "bf16", "none"},
                      FamilySetting{"cuda_bf16_recompute", DryRunDevice::kCuda, "DiT-XL/2", "bf16", "all"},
                      FamilySetting{"cuda_f32", DryRunDevice::kCuda, "DiT-B/8", "f32", "1"},
                      FamilySetting{"cpu_f32", DryRunDevice::kCpu, "DiT-S/2", "f32", "all"}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace kiln
