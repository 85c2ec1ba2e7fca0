// The gradient of a 3x3 convolution's weight at the shapes of Stable Diffusion's U-Net, half and full width,
// against oneDNN's.

#include "compare.h"
#include "core/aten.h"
#include "ops/ops.h"
#include "ops/pictures/convolution.h"

namespace kiln {
namespace {

// Arguments: batch, channels in and out, side of the picture.
void conv_grad_weight(benchmark::State& state, at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  const int64_t batch = state.range(0), in = state.range(1), out = state.range(2), side = state.range(3);
  const auto pixels = [&](int64_t channels) {
    return at::randn({batch, channels, side, side}).to(dtype).contiguous(at::MemoryFormat::ChannelsLast);
  };
  const at::Tensor x = pixels(in), grad = pixels(out), weight = at::randn({out, in, 3, 3}).to(dtype);
  benchmarks::compare(
      state, 18.0 * static_cast<double>(x.numel() * out),
      [&] { ops::conv_grad_weight(grad, x, weight, {.padding = 1}); },
      [&] {
        at::convolution_backward(grad.to(at::kFloat), x.to(at::kFloat), weight.to(at::kFloat), std::nullopt,
                                 {1, 1}, {1, 1}, {1, 1}, /*transposed=*/false, {0, 0}, /*groups=*/1,
                                 {false, true, false});
      },
      "GFLOP/s");
}

void shapes(benchmark::internal::Benchmark* benchmark) {
  benchmark->Args({4, 160, 160, 32})->Args({4, 320, 320, 16})->Args({4, 640, 640, 8})->Args({4, 640, 640, 4});
  benchmark->Args({4, 1280, 640, 8})->Args({1, 320, 320, 64})->UseManualTime()->Unit(benchmark::kMillisecond);
}
BENCHMARK_CAPTURE(conv_grad_weight, f32, at::kFloat)->Apply(shapes);
BENCHMARK_CAPTURE(conv_grad_weight, bf16, at::kBFloat16)->Apply(shapes);

}  // namespace
}  // namespace kiln
