// Composed traces against the traces themselves.
#include "plan/trace/trace_family.h"
#include "run/option_values.h"

#include <gtest/gtest.h>

namespace kiln {
namespace {

struct FamilySetting {
  const char* name;
  DryRunDevice device;
  const char *model, *dtype, *recompute;
};

// But for the sizes of what gathers and reads the losses of all passes.
void expect_equal_ops(const StepTrace& composed, const StepTrace& expected) {
  ASSERT_EQ(composed.spans.size(), expected.spans.size());
  for (size_t s = 0; s < expected.spans.size(); ++s) {
    const Span &span = composed.spans[s], &wanted_span = expected.spans[s];
    ASSERT_EQ(span.times, wanted_span.times) << s;
    ASSERT_EQ(span.ops.size(), wanted_span.ops.size()) << s;
    for (size_t i = 0; i < wanted_span.ops.size(); ++i) {
      const OpRecord &op = span.ops[i], &wanted = wanted_span.ops[i];
      ASSERT_EQ(op.name, wanted.name) << s << " " << i;
      ASSERT_DOUBLE_EQ(op.flops, wanted.flops) << op.name;
      ASSERT_EQ(std::tie(op.m, op.n, op.k), std::tie(wanted.m, wanted.n, wanted.k)) << op.name;
      if (op.name != "aten::cat" && op.name != "kiln::step_scale") {
        ASSERT_DOUBLE_EQ(op.bytes, wanted.bytes) << op.name;
      }
    }
  }
}

class Composed : public ::testing::TestWithParam<FamilySetting> {
 protected:
  // `steps`: images of a pass and of a step. `check` gets both traces and the latter.
  void compare(int64_t depth, const std::vector<std::pair<int64_t, int64_t>>& steps, const auto& check) {
    const FamilySetting& setting = GetParam();
    TrainOptions options;
    options.model.name = setting.model;
    options.model.depth = depth;
    set_option(options, "compute-dtype", setting.dtype);
    options.memory.recompute = SegmentSet::parse(setting.recompute);
    const DataShape data = synthetic_shape(options);
    TraceFamily family(options, data, setting.device, 64);
    for (const auto& [micro_batch, images] : steps) {
      SCOPED_TRACE(fmt::format("{} in passes of {}", images, micro_batch));
      TrainOptions traced = options;
      traced.micro_batch = micro_batch;
      traced.global_batch = images;
      const StepTrace expected = trace_step(traced, data, setting.device);
      const StepTrace& composed = family.at(micro_batch, images);
      check(composed, expected, images);
      expect_equal_ops(composed, expected);
    }
  }
};

TEST_P(Composed, EqualsTheTrace) {
  const auto check = [](const StepTrace& composed, const StepTrace& expected, int64_t) {
    EXPECT_EQ(composed.memory.persistent_bytes, expected.memory.persistent_bytes);
    EXPECT_EQ(composed.memory.peak_bytes, expected.memory.peak_bytes);
    ASSERT_EQ(composed.spans.size(), expected.spans.size());
    for (size_t s = 0; s < expected.spans.size(); ++s) {
      const Span &span = composed.spans[s], &wanted = expected.spans[s];
      SCOPED_TRACE(s);
      ASSERT_EQ(std::tie(span.micro_step, span.phase, span.segment),
                std::tie(wanted.micro_step, wanted.phase, wanted.segment));
      EXPECT_EQ(span.live_bytes, wanted.live_bytes);
      EXPECT_EQ(span.peak_bytes, wanted.peak_bytes);
      ASSERT_EQ(span.events.size(), wanted.events.size());
      for (size_t i = 0; i < wanted.events.size(); ++i)
        ASSERT_EQ(span.events[i].bytes, wanted.events[i].bytes) << i;
    }
  };
  compare(3, {{1, 1}, {3, 3}, {8, 24}, {17, 51}, {32, 96}}, check);
}

// Two passes, several, many; and a rest of one image and of more.
TEST_P(Composed, HasThePassesOfTheTrace) {
  const auto check = [](const StepTrace& composed, const StepTrace& expected, int64_t images) {
    // Losses are left behind by every pass: a few bytes per image.
    EXPECT_NEAR(static_cast<double>(composed.memory.peak_bytes),
                static_cast<double>(expected.memory.peak_bytes), 64.0 * static_cast<double>(images));
  };
  compare(2, {{8, 16}, {8, 40}, {8, 48}, {4, 100}, {5, 33}, {8, 25}}, check);
}

// Scratch of a CPU's half-precision products goes in steps.
TEST(TraceFamily, IsTheTraceWhereMemoryIsNotAffine) {
  TrainOptions options;
  options.model.name = "DiT-S/8";
  options.model.depth = 3;
  options.compute.dtype = at::kBFloat16;
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
