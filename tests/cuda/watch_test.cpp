// What is measured on a GPU: phases by events, the driver's readings, single operations.
#include <ATen/DeviceAccelerator.h>
#include <gmock/gmock.h>

#include <numeric>

#include "cuda/gpu_test.h"
#include "ops/op_recorder.h"
#include "parallel/nvml.h"
#include "plan/price/this_machine.h"
#include "watch/phase_timers.h"

namespace kiln {
namespace {

using test::kGpu;
using CudaWatch = test::GpuTest;

at::Tensor products(int count) {
  at::Tensor product = at::ones({4096, 4096}, at::TensorOptions(kGpu));
  for (int i = 0; i < count; ++i) product = at::matmul(product, product) / 4096;
  return product;
}

// The host is far ahead of the GPU: what counts is when the GPU gets there.
TEST_F(CudaWatch, PhasesAreTimedOnTheDevice) {
  products(2);
  at::accelerator::synchronizeDevice(0);
  PhaseTimers timers(kGpu);
  const auto begin = std::chrono::steady_clock::now();
  timers.begin(StepPhase::kForward, 0);
  products(1);
  timers.begin(StepPhase::kBackward, 0);
  products(8);
  timers.end_step();
  at::accelerator::synchronizeDevice(0);
  const double wall = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  const PhaseSeconds seconds = timers.take();
  const double forward = seconds[static_cast<size_t>(StepPhase::kForward)],
               backward = seconds[static_cast<size_t>(StepPhase::kBackward)];
  EXPECT_GT(forward, 0);
  EXPECT_GT(backward, 3 * forward);
  EXPECT_LE(forward + backward, wall * 1.05);
}

TEST_F(CudaWatch, TheDriverSaysHowTheGpuIs) {
  const auto nvml = Nvml::open(0);
  if (!nvml) GTEST_SKIP() << "no NVML here";
  const at::Tensor held = at::empty({int64_t{256} << 20}, at::TensorOptions(kGpu).dtype(at::kByte));
  const GpuReading reading = nvml->read();
  ASSERT_TRUE(reading.memory_bytes && reading.memory_total_bytes);
  EXPECT_GE(*reading.memory_bytes, int64_t{256} << 20);
  EXPECT_GT(*reading.memory_total_bytes, *reading.memory_bytes);
  if (reading.watts) EXPECT_THAT(*reading.watts, ::testing::AllOf(::testing::Gt(1), ::testing::Lt(2000)));
  if (reading.utilisation) EXPECT_LE(*reading.utilisation, 1);
}

// What timing an operation takes is not counted to it.
TEST_F(CudaWatch, SmallOperationsAreNotTimedTooLong) {
  OpRecorder recorder(/*timed=*/true, kGpu);
  at::Tensor small = at::zeros({16}, at::TensorOptions(kGpu));
  for (int i = 0; i < 50; ++i) small.add_(1);
  std::vector<double> seconds;
  for (const OpRecord& op : recorder.take()) seconds.push_back(op.seconds);
  ASSERT_EQ(seconds.size(), 50u);
  std::ranges::sort(seconds);
  EXPECT_LT(seconds[25], 5e-6);
}

// A fifth of the data sheet at least: otherwise its figure is another GPU's.
TEST_F(CudaWatch, TheDataSheetIsOfThisGpu) {
  const double sheet = data_sheet_flops(kGpu, at::kHalf, false);
  if (sheet == 0) GTEST_SKIP() << "no built-in profile of " << machine_name(kGpu);
  const double measured = measure_peak_flops(kGpu, at::kHalf);
  EXPECT_GT(measured, 0.2 * sheet);
  EXPECT_LT(measured, 1.1 * sheet);
}

}  // namespace
}  // namespace kiln
