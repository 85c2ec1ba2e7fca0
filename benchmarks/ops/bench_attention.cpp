// packed_attention against ATen's flash attention on the same views, as scaled_dot_product_attention calls
// it. Arguments: batch, tokens, heads, head size, dtype (0 f32, 1 bf16). A product counts 2 N N d operations:
// 2 products forward, 5 backward.
#include <torch/csrc/autograd/autograd.h>

#include <cmath>

#include "compare.h"
#include "core/aten.h"
#include "ops/ops.h"

namespace {

struct Inputs {
  int64_t batch, num_tokens, num_heads, head_dim;
  at::Tensor qkv, q, k, v, grad;
  double scale, product_flops;
  explicit Inputs(const benchmark::State& state)
      : batch(state.range(0)),
        num_tokens(state.range(1)),
        num_heads(state.range(2)),
        head_dim(state.range(3)) {
    const auto dtype = state.range(4) ? at::kBFloat16 : at::kFloat;
    qkv = at::randn({batch, num_tokens, 3, num_heads, head_dim}).to(dtype);
    const auto heads = qkv.permute({2, 0, 3, 1, 4});
    q = heads[0], k = heads[1], v = heads[2];
    grad = at::randn({batch, num_tokens, num_heads * head_dim}).to(dtype);
    scale = 1 / std::sqrt(static_cast<double>(head_dim));
    product_flops = 2.0 * batch * num_heads * num_tokens * num_tokens * head_dim;
  }
};

void forward(benchmark::State& state) {
  const Inputs in(state);
  const at::NoGradGuard no_grad;
  kiln::benchmarks::compare(
      state, 2 * in.product_flops, [&] { kiln::ops::packed_attention(in.qkv, in.scale); },
      [&] {
        const auto result =
            at::_scaled_dot_product_flash_attention_for_cpu(in.q, in.k, in.v, 0.0, false, {}, in.scale);
        std::get<0>(result).transpose(1, 2).flatten(2).contiguous();
      },
      "GFLOP/s");
}

void backward(benchmark::State& state) {
  const Inputs in(state);
  const at::Tensor leaf = in.qkv.clone().requires_grad_();
  const at::Tensor out = kiln::ops::packed_attention(leaf, in.scale);
  const auto [aten_out, log_sum] =
      at::_scaled_dot_product_flash_attention_for_cpu(in.q, in.k, in.v, 0.0, false, {}, in.scale);
  const at::Tensor grad = in.grad.view({in.batch, in.num_tokens, in.num_heads, in.head_dim}).transpose(1, 2);
  kiln::benchmarks::compare(
      state, 5 * in.product_flops,
      [&] { torch::autograd::grad({out}, {leaf}, {in.grad}, /*retain_graph=*/true); },
      [&] {
        const auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
            grad, in.q, in.k, in.v, aten_out, log_sum, 0.0, false, {}, in.scale);
        at::stack({dq, dk, dv}).permute({1, 3, 0, 2, 4}).contiguous();
      },
      "GFLOP/s");
}

void shapes(benchmark::internal::Benchmark* bench) {
  for (const int64_t bf16 : {1, 0}) {
    bench->Args({32, 256, 6, 64, bf16});  // DiT-S/2
    bench->Args({4, 1024, 8, 20, bf16});  // a U-Net half as wide
    bench->Args({4, 256, 8, 40, bf16});
    bench->Args({8, 256, 16, 72, bf16});   // DiT-XL/2
    bench->Args({2, 1024, 16, 72, bf16});  // at 512 px
    bench->Args({8, 1024, 6, 64, bf16});   // PixArt-Sigma, width 384
  }
  bench->UseManualTime()->Unit(benchmark::kMillisecond)->MinTime(0.2);
}

BENCHMARK(forward)->Apply(shapes);
BENCHMARK(backward)->Apply(shapes);

}  // namespace
