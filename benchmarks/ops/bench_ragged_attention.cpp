// ragged_attention against ATen's flash attention, sample by sample as scaled_dot_product_attention calls it.
// Arguments: batch, tokens, heads, head size, mean rows of a caption, dtype (0 f32, 1 bf16). Captions have
// from half to one and a half times as many rows. A product counts 2 N L d operations: 2 products forward, 5
// backward.
#include <torch/csrc/autograd/autograd.h>

#include <cmath>

#include "compare.h"
#include "core/aten.h"
#include "ops/ops.h"

namespace {

struct Sample {
  at::Tensor q, k, v, grad;  // (1, H, N or L, d), views
};

struct Inputs {
  int64_t batch, num_tokens, num_heads, head_dim;
  std::vector<int64_t> offsets = {0};
  at::Tensor q, k, v, grad;
  double scale, product_flops;
  explicit Inputs(const benchmark::State& state)
      : batch(state.range(0)),
        num_tokens(state.range(1)),
        num_heads(state.range(2)),
        head_dim(state.range(3)) {
    const int64_t mean_rows = state.range(4);
    for (int64_t b = 0; b < batch; ++b)
      offsets.push_back(offsets.back() + mean_rows / 2 +
                        mean_rows * (b * 7 % batch) / std::max<int64_t>(batch - 1, 1));
    const auto dtype = state.range(5) ? at::kBFloat16 : at::kFloat;
    q = at::randn({batch, num_tokens, num_heads, head_dim}).to(dtype);
    const at::Tensor kv = at::randn({offsets.back(), 2, num_heads, head_dim}).to(dtype);
    k = kv.select(1, 0), v = kv.select(1, 1);
    grad = at::randn({batch, num_tokens, num_heads * head_dim}).to(dtype);
    scale = 1 / std::sqrt(static_cast<double>(head_dim));
    product_flops = 2.0 * num_heads * num_tokens * offsets.back() * head_dim;
  }
  Sample sample(int64_t b) const {
    const auto rows = [&](const at::Tensor& tensor) {
      return tensor.narrow(0, offsets[b], offsets[b + 1] - offsets[b]).unsqueeze(0).transpose(1, 2);
    };
    return {q.narrow(0, b, 1).transpose(1, 2), rows(k), rows(v),
            grad.narrow(0, b, 1).view({1, num_tokens, num_heads, head_dim}).transpose(1, 2)};
  }
};

void forward(benchmark::State& state) {
  const Inputs in(state);
  const at::NoGradGuard no_grad;
  kiln::benchmarks::compare(
      state, 2 * in.product_flops,
      [&] { kiln::ops::ragged_attention(in.q, in.k, in.v, in.offsets, in.scale); },
      [&] {
        for (int64_t b = 0; b < in.batch; ++b) {
          const Sample s = in.sample(b);
          at::_scaled_dot_product_flash_attention_for_cpu(s.q, s.k, s.v, 0.0, false, {}, in.scale);
        }
      },
      "GFLOP/s");
}

void backward(benchmark::State& state) {
  const Inputs in(state);
  const std::vector<at::Tensor> leaves = {in.q.clone().requires_grad_(), in.k.clone().requires_grad_(),
                                          in.v.clone().requires_grad_()};
  const at::Tensor out = kiln::ops::ragged_attention(leaves[0], leaves[1], leaves[2], in.offsets, in.scale);
  std::vector<std::tuple<at::Tensor, at::Tensor>> aten;
  for (int64_t b = 0; b < in.batch; ++b) {
    const Sample s = in.sample(b);
    aten.push_back(at::_scaled_dot_product_flash_attention_for_cpu(s.q, s.k, s.v, 0.0, false, {}, in.scale));
  }
  kiln::benchmarks::compare(
      state, 5 * in.product_flops,
      [&] { torch::autograd::grad({out}, leaves, {in.grad}, /*retain_graph=*/true); },
      [&] {
        for (int64_t b = 0; b < in.batch; ++b) {
          const Sample s = in.sample(b);
          const auto& [attended, log_sum] = aten[b];
          at::_scaled_dot_product_flash_attention_for_cpu_backward(s.grad, s.q, s.k, s.v, attended, log_sum,
                                                                   0.0, false, {}, in.scale);
        }
      },
      "GFLOP/s");
}

void shapes(benchmark::internal::Benchmark* bench) {
  for (const int64_t bf16 : {1, 0}) {
    bench->Args({64, 256, 6, 32, 6, bf16});      // a small model, short labels
    bench->Args({8, 1024, 16, 72, 30, bf16});    // PixArt-XL/2 at 512 px, short captions
    bench->Args({8, 1024, 6, 64, 120, bf16});    // long captions
    bench->Args({2, 1024, 16, 72, 300, bf16});   // the longest ones of T5
    bench->Args({1, 4096, 16, 72, 1024, bf16});  // PixArt-Sigma's compressed keys at 1024 px
  }
  bench->UseManualTime()->Unit(benchmark::kMillisecond)->MinTime(0.2);
}

BENCHMARK(forward)->Apply(shapes);
BENCHMARK(backward)->Apply(shapes);

}  // namespace
