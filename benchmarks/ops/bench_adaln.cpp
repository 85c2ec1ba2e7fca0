// adaln_modulate and gated_residual on the tokens of DiT-S/2 at batch 32: (32, 256, 384), f32 residual and
// bf16 branches, against the composition that PyTorch runs under autocast.
#include <torch/csrc/autograd/autograd.h>

#include "compare.h"
#include "core/aten.h"
#include "ops/ops.h"

namespace kiln {
namespace {

using benchmarks::compare;

constexpr int64_t kBatch = 32, kTokens = 256, kWidth = 384;
constexpr double kElements = kBatch * kTokens * kWidth;

struct Inputs {
  at::Tensor x = at::randn({kBatch, kTokens, kWidth}).requires_grad_();
  at::Tensor modulation = at::randn({kBatch, 6 * kWidth}).to(at::kBFloat16);
  at::Tensor shift = modulation.narrow(1, 0, kWidth).requires_grad_();
  at::Tensor scale = modulation.narrow(1, kWidth, kWidth).requires_grad_();
  at::Tensor y = at::randn({kBatch, kTokens, kWidth}).to(at::kBFloat16).requires_grad_();
  at::Tensor grad_bf16 = at::randn({kBatch, kTokens, kWidth}).to(at::kBFloat16);
  at::Tensor grad_f32 = at::randn({kBatch, kTokens, kWidth});

  at::Tensor adaln() const { return ops::adaln_modulate(x, shift, scale, 1e-6, at::kBFloat16); }
  at::Tensor composed_adaln() const {
    const at::Tensor normalised = at::layer_norm(x, {kWidth}, {}, {}, 1e-6);
    return (normalised * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)).to(at::kBFloat16);
  }
  at::Tensor gated() const { return ops::gated_residual(x, scale, y); }
  at::Tensor composed_gated() const { return x + scale.unsqueeze(1) * y; }
};

void backward(const at::Tensor& out, const at::Tensor& grad, const std::vector<at::Tensor>& inputs) {
  torch::autograd::grad({out}, inputs, {grad});
}

void adaln_forward(benchmark::State& state) {
  const at::NoGradGuard no_grad;
  const Inputs in;
  compare(
      state, kElements * (4 + 2), [&] { in.adaln(); }, [&] { in.composed_adaln(); });
}

void adaln_forward_backward(benchmark::State& state) {
  const Inputs in;
  compare(
      state, kElements * (4 + 2 + 4 + 2 + 4),
      [&] {
        backward(in.adaln(), in.grad_bf16, {in.x, in.shift, in.scale});
      },
      [&] {
        backward(in.composed_adaln(), in.grad_bf16, {in.x, in.shift, in.scale});
      });
}

void gated_residual_forward(benchmark::State& state) {
  const at::NoGradGuard no_grad;
  const Inputs in;
  compare(
      state, kElements * (4 + 2 + 4), [&] { in.gated(); }, [&] { in.composed_gated(); });
}

void gated_residual_forward_backward(benchmark::State& state) {
  const Inputs in;
  compare(
      state, kElements * (4 + 2 + 4 + 4 + 2 + 2),
      [&] {
        backward(in.gated(), in.grad_f32, {in.x, in.scale, in.y});
      },
      [&] {
        backward(in.composed_gated(), in.grad_f32, {in.x, in.scale, in.y});
      });
}

BENCHMARK(adaln_forward)->UseManualTime()->Unit(benchmark::kMillisecond);
BENCHMARK(adaln_forward_backward)->UseManualTime()->Unit(benchmark::kMillisecond);
BENCHMARK(gated_residual_forward)->UseManualTime()->Unit(benchmark::kMillisecond);
BENCHMARK(gated_residual_forward_backward)->UseManualTime()->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace kiln
