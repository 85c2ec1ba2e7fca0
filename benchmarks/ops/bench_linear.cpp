// linear and gelu_tanh_linear against ATen's ops under autograd. Arguments: rows, in, out, dtype (0 f32, 1
// bf16, 2 fp16, whose CPU products ATen runs without SIMD: few rows).
#include <torch/csrc/autograd/autograd.h>

#include "compare.h"
#include "core/aten.h"
#include "ops/ops.h"

namespace {

struct Inputs {
  at::ScalarType dtype;
  at::Tensor x, weight, bias, grad;
  double product_flops;
  explicit Inputs(const benchmark::State& state) {
    const int64_t rows = state.range(0), in = state.range(1), out = state.range(2);
    dtype = state.range(3) == 0 ? at::kFloat : state.range(3) == 1 ? at::kBFloat16 : at::kHalf;
    at::globalContext().setFloat32MatmulPrecision("medium");  // as the program does
    x = at::randn({rows / 8, 8, in}).to(dtype).requires_grad_();
    weight = (at::randn({out, in}) * 0.02).to(dtype).requires_grad_();
    bias = at::zeros({out}, dtype).requires_grad_();
    grad = at::randn({rows / 8, 8, out}).to(dtype);
    product_flops = 2.0 * rows * in * out;
  }
};

template <class Kiln, class Other>
void forward_and_backward(benchmark::State& state, const Kiln& kiln_op, const Other& other_op) {
  const Inputs in(state);
  const auto step = [&](const at::Tensor& out) {
    torch::autograd::grad({out}, {in.x, in.weight, in.bias}, {in.grad});
  };
  kiln::benchmarks::compare(
      state, 3 * in.product_flops, [&] { step(kiln_op(in)); }, [&] { step(other_op(in)); }, "GFLOP/s");
}

void linear(benchmark::State& state) {
  forward_and_backward(
      state, [](const Inputs& in) { return kiln::ops::linear(in.x, in.weight, in.bias, in.dtype); },
      [](const Inputs& in) { return at::linear(in.x, in.weight, in.bias); });
}

void gelu_tanh_linear(benchmark::State& state) {
  forward_and_backward(
      state, [](const Inputs& in) { return kiln::ops::gelu_tanh_linear(in.x, in.weight, in.bias, in.dtype); },
      [](const Inputs& in) { return at::linear(at::gelu(in.x, "tanh"), in.weight, in.bias); });
}

// DiT-S/2, batch 32: qkv, projection, the two of the MLP, and the modulation.
BENCHMARK(linear)
    ->ArgsProduct({{8192}, {384}, {1152, 384, 1536}, {1, 0}})
    ->Args({32, 384, 2304, 1})
    ->Args({256, 384, 384, 2})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond)
    ->MinTime(0.3);
BENCHMARK(gelu_tanh_linear)
    ->ArgsProduct({{8192}, {1536}, {384}, {1, 0}})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond)
    ->MinTime(0.3);

}  // namespace
