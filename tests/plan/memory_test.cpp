// The predicted memory of a step against the measured one: the dry run on meta tensors against the same step
// on the CPU under the tracking allocator.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>

#include "core/allocations.h"
#include "core/aten.h"
#include "core/error.h"
#include "data/loader/batch.h"
#include "parallel/machine.h"
#include "plan/trace/trace.h"
#include "step/span_recorder.h"
#include "train/settings.h"

namespace kiln {
namespace {

TrainOptions options_of(const std::string& model, const nlohmann::json& changes) {
  TrainOptions options = changed({}, "data=synthetic out=unused device=cpu image-size=128 global-batch=4");
  options.model.name = model;
  return changed(options, changes);
}

// One step like that of a run, after another one has warmed up what lives on.
StepMemory measured_step(const TrainOptions& options, const DataShape& data) {
  const Training training = build_training(options, data, at::kCPU);
  Batch batch;
  batch.shape = batch_shape(batch_options_of(options), data, data.largest(), options.global_batch);
  const auto pixels = static_cast<size_t>(batch.size_with_halo() * batch.shape.sample_elements());
  batch.x_0.assign(pixels, 0.5f);
  batch.noise.assign(pixels, -0.25f);
  batch.time_uniform.assign(batch.size_with_halo(), 0.5);
  batch.class_labels.assign(batch.size(), 1);
  training.step->run(as_tensors(batch, *training.objective), options.lr.peak);

  SpanRecorder recorder;
  recorder.register_state(*training.state);
  training.step->observe(&recorder);
  observe_cpu_allocations(&recorder);
  {
    const StepBatch tensors = as_tensors(batch, *training.objective);
    training.step->run(tensors, options.lr.peak);
  }
  observe_cpu_allocations(nullptr);
  training.step->observe(nullptr);
  return recorder.finish().memory;
}

struct MemoryCase {
  std::string model;
  nlohmann::json options;
};

std::vector<MemoryCase> short_list() {
  return {
      {"DiT-S/2", {{"depth", 3}}},
      {"DiT-S/2", {{"depth", 3}, {"recompute", "all"}, {"global-batch", 8}}},
      {"DiT-S/2", {{"depth", 3}, {"recompute", "0,2"}, {"compute-dtype", "bf16"}}},
      {"DiT-S/2", {{"depth", 3}, {"compute-dtype", "bf16"}, {"global-batch", 16}}},
      {"DiT-S/2", {{"depth", 3}, {"compute-dtype", "bf16"}, {"micro-batch", 3}, {"global-batch", 7}}},
      {"DiT-S/2", {{"depth", 2}, {"compute-dtype", "fp16"}, {"global-batch", 3}}},
      {"DiT-S/4", {{"depth", 3}, {"ema-decay", nlohmann::json::array()}, {"global-batch", 5}}},
      {"DiT-S/4", {{"depth", 2}, {"compute-dtype", "fp16"}, {"recompute", "all"}}},
      {"DiT-S/8", {{"depth", 3}, {"ema-decay", {0.999, 0.9999}}, {"micro-batch", 2}}},
      {"DiT-S/8", {{"depth", 3}, {"compute-dtype", "bf16"}, {"recompute", "all"}, {"global-batch", 9}}},
      {"DiT-B/4", {{"depth", 2}, {"compute-dtype", "bf16"}, {"global-batch", 6}}},
      {"DiT-B/2", {{"depth", 2}, {"recompute", "embed,1"}, {"objective", "flow"}}},
      {"DiT-S/8", {{"depth", 2}, {"micro-batch", 3}, {"objective", "flow"}, {"contrastive-weight", 0.05}}},
  };
}

// Every family and patch with four variants each; the large ones at a part of their depth.
std::vector<MemoryCase> long_list() {
  std::vector<MemoryCase> list;
  for (const auto& [family, depth] :
       std::vector<std::pair<std::string, int64_t>>{{"S", 0}, {"B", 0}, {"L", 4}, {"XL", 4}})
    for (int64_t patch : {2, 4, 8}) {
      const std::string model = fmt::format("DiT-{}/{}", family, patch);
      const auto add = [&](nlohmann::json options) {
        options["depth"] = depth;
        list.push_back({model, std::move(options)});
      };
      add({{"global-batch", 3}});
      add({{"compute-dtype", "bf16"}, {"recompute", "all"}, {"global-batch", 8}});
      add({{"compute-dtype", "bf16"}, {"recompute", "1-2"}, {"micro-batch", 2}, {"global-batch", 5}});
      add({{"compute-dtype", "fp16"}, {"ema-decay", nlohmann::json::array()}, {"global-batch", 2}});
    }
  list.push_back({"DiT-L/8", {{"compute-dtype", "bf16"}, {"global-batch", 2}}});
  list.push_back({"DiT-XL/8", {{"compute-dtype", "bf16"}, {"recompute", "all"}, {"global-batch", 2}}});
  return list;
}

// Prints one line for each and returns the errors as shares of the measured peak.
std::vector<double> compare(const std::vector<MemoryCase>& configurations) {
  std::vector<double> errors;
  fmt::print("{:<9} {:<86} {:>13} {:>13} {:>8}\n", "model", "options", "predicted", "measured", "error");
  for (const auto& [model, changes] : configurations) {
    const TrainOptions options = options_of(model, changes);
    const DataShape data = synthetic_shape(options);
    const StepMemory predicted = trace_step(options, data, DryRunDevice::kCpu).memory;
    const StepMemory measured = measured_step(options, data);
    EXPECT_EQ(predicted.persistent, measured.persistent) << model << changes;
    const double error =
        static_cast<double>(predicted.peak_bytes) / static_cast<double>(measured.peak_bytes) - 1;
    errors.push_back(std::abs(error));
    fmt::print("{:<9} {:<86} {:>13} {:>13} {:>7.3f}%\n", model, changes.dump(), predicted.peak_bytes,
               measured.peak_bytes, 100 * error);
  }
  std::ranges::sort(errors);
  fmt::print("{} configurations: median error {:.4f} %, worst {:.4f} %\n", errors.size(),
             100 * errors[errors.size() / 2], 100 * errors.back());
  return errors;
}

class PlannedMemory : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    install_tracking_cpu_allocator();
    apply(ComputeSettings{.device = at::kCPU});
  }
};

void expect_close(const std::vector<double>& errors) {
  EXPECT_LT(errors[errors.size() / 2], 0.01);
  EXPECT_LT(errors.back(), 0.03);
}

TEST_F(PlannedMemory, EqualsTheMeasuredPeak) { expect_close(compare(short_list())); }

TEST_F(PlannedMemory, EqualsTheMeasuredPeakOfEveryFamily) {
  if (!std::getenv("KILN_FULL")) GTEST_SKIP() << "set KILN_FULL=1: takes minutes";
  expect_close(compare(long_list()));
}

TEST_F(PlannedMemory, KindsAddUpToThePeak) {
  for (const char* recompute : {"none", "all"}) {
    const TrainOptions options = options_of(
        "DiT-S/4", {{"depth", 2}, {"compute-dtype", "bf16"}, {"recompute", recompute}, {"global-batch", 64}});
    for (DryRunDevice device : {DryRunDevice::kCpu, DryRunDevice::kCuda}) {
      const StepTrace trace = trace_step(options, synthetic_shape(options), device);
      const StepMemory& memory = trace.memory;
      int64_t sum = 0, persistent = 0;
      for (const auto& [kind, bytes] : memory.peak_by_kind) sum += bytes;
      for (const auto& [kind, bytes] : memory.persistent) persistent += bytes;
      EXPECT_EQ(sum, memory.peak_bytes);
      EXPECT_EQ(persistent, memory.persistent_bytes);
      EXPECT_GT(memory.peak_by_kind.at(MemoryKind::kActivations), 0);
      int64_t highest = 0;
      for (const Span& span : trace.spans) highest = std::max(highest, span.peak_bytes);
      EXPECT_EQ(highest, memory.peak_bytes);
    }
  }
}

// A GPU gets copies of the batch; a CPU reads the loader's arrays.
TEST_F(PlannedMemory, OnlyAGpuCopiesTheBatch) {
  const TrainOptions options = options_of("DiT-S/8", {{"depth", 1}, {"global-batch", 64}});
  const DataShape data = synthetic_shape(options);
  const auto input_bytes = [&](DryRunDevice device) {
    int64_t bytes = 0;
    for (const Span& span : trace_step(options, data, device).spans)
      for (const MemoryEvent& event : span.events)
        if (event.kind == MemoryKind::kBatch && event.bytes > 0) bytes += event.bytes;
    return bytes;
  };
  const int64_t image_bytes = 64 * data.channels * data.largest().area() * 4;
  EXPECT_GE(input_bytes(DryRunDevice::kCuda) - input_bytes(DryRunDevice::kCpu), 2 * image_bytes);
}

TEST_F(PlannedMemory, TheDryRunUsesNone) {
  const TrainOptions options = options_of("DiT-XL/2", {{"image-size", 256}, {"global-batch", 256}});
  const int64_t before = live_cpu_bytes().live;
  reset_peak_cpu_bytes();
  const StepMemory memory = trace_step(options, synthetic_shape(options), DryRunDevice::kCuda).memory;
  EXPECT_GT(memory.peak_bytes, int64_t{100} << 30);
  EXPECT_LT(live_cpu_bytes().peak - before, 8 << 20);
  EXPECT_LE(live_cpu_bytes().live - before, 1 << 20);
}

}  // namespace
}  // namespace kiln
