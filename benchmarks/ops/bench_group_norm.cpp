// GroupNorm + SiLU on the widest layers of KL-f8 at 256 px, against ATen's group_norm and silu.

#include "compare.h"
#include "core/aten.h"
#include "ops/ops.h"

namespace kiln {
namespace {

void group_norm(benchmark::State& state, at::ScalarType dtype, at::MemoryFormat format) {
  const at::NoGradGuard no_grad;
  const at::Tensor x = at::randn({1, 128, 256, 256}).to(dtype).contiguous(format);
  const at::Tensor weight = at::ones({128}, dtype), bias = at::zeros({128}, dtype);
  benchmarks::compare(
      state, 2.0 * x.nbytes(), [&] { ops::group_norm_silu(x, 32, weight, bias, 1e-6, true); },
      [&] { at::silu(at::group_norm(x, 32, weight, bias, 1e-6)); });
}

BENCHMARK_CAPTURE(group_norm, bf16_contiguous, at::kBFloat16, at::MemoryFormat::Contiguous)
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(group_norm, bf16_channels_last, at::kBFloat16, at::MemoryFormat::ChannelsLast)
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(group_norm, f32_contiguous, at::kFloat, at::MemoryFormat::Contiguous)
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(group_norm, f32_channels_last, at::kFloat, at::MemoryFormat::ChannelsLast)
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace kiln
