// GELU (tanh), the MLP activation of DiT-S/2 at batch 32: (32, 256, 1536), against ATen.

#include "compare.h"
#include "core/aten.h"
#include "ops/gelu.h"

namespace kiln {
namespace {

using benchmarks::compare;

void gelu_forward(benchmark::State& state, at::ScalarType dtype) {
  const at::Tensor in = at::randn({32, 256, 1536}).to(dtype);
  at::Tensor out = at::empty_like(in);
  compare(
      state, 2.0 * in.nbytes(), [&] { ops::gelu_tanh_forward(in, out); },
      [&] { at::gelu_out(out, in, "tanh"); });
}

void gelu_backward(benchmark::State& state, at::ScalarType dtype) {
  const at::Tensor in = at::randn({32, 256, 1536}).to(dtype), grad = at::randn(in.sizes()).to(dtype);
  at::Tensor out = at::empty_like(in);
  compare(
      state, 3.0 * in.nbytes(), [&] { ops::gelu_tanh_backward(grad, in, out); },
      [&] { at::gelu_backward_out(out, grad, in, "tanh"); });
}

BENCHMARK_CAPTURE(gelu_forward, bf16, at::kBFloat16)->UseManualTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(gelu_forward, f32, at::kFloat)->UseManualTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(gelu_backward, bf16, at::kBFloat16)->UseManualTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(gelu_backward, f32, at::kFloat)->UseManualTime()->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace kiln
