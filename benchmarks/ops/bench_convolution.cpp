// 3x3 convolutions and their gradients at the shapes of Stable Diffusion's U-Net, half as wide, against
// oneDNN's.

#include "compare.h"
#include "core/aten.h"
#include "core/cpu_level.h"
#include "ops/ops.h"
#include "ops/pictures/convolution.h"

namespace kiln {
namespace {

enum class Part { kForward, kGradX, kGradWeight };

// Arguments: batch, channels in and out, side of the picture, stride.
void convolution(benchmark::State& state, at::ScalarType dtype, Part part) {
  static const bool is_lowered = (lower_cpu_level(), true);  // to KILN_CPU, before anything is computed
  static_cast<void>(is_lowered);
  const at::NoGradGuard no_grad;
  const int64_t batch = state.range(0), in = state.range(1), out = state.range(2), side = state.range(3);
  const ops::ConvolutionShape shape{.stride = state.range(4), .padding = 1};
  const auto pixels = [&](int64_t channels, int64_t of_side) {
    return at::randn({batch, channels, of_side, of_side})
        .to(dtype)
        .contiguous(at::MemoryFormat::ChannelsLast);
  };
  const at::Tensor x = pixels(in, side), grad = pixels(out, side / shape.stride),
                   weight = at::randn({out, in, 3, 3}).to(dtype), bias = at::randn({out}).to(dtype);
  const int64_t stride[] = {shape.stride, shape.stride};
  benchmarks::compare(
      state, 18.0 * static_cast<double>(grad.numel() * in),
      [&] {
        if (part == Part::kForward) return ops::conv_forward(x, weight, bias, shape);
        if (part == Part::kGradX) return ops::conv_grad_x(grad, x.sizes(), weight, shape);
        return ops::conv_grad_weight(grad, x, weight, shape);
      },
      [&] {
        if (part == Part::kForward) return at::conv2d(x, weight, bias, stride, {1, 1});
        const auto grads = at::convolution_backward(grad, x, weight, std::nullopt, stride, {1, 1}, {1, 1},
                                                    /*transposed=*/false, {0, 0}, /*groups=*/1,
                                                    {part == Part::kGradX, part == Part::kGradWeight, false});
        return part == Part::kGradX ? std::get<0>(grads) : std::get<1>(grads);
      },
      "GFLOP/s");
}

void shapes(benchmark::internal::Benchmark* benchmark) {
  benchmark->Args({4, 160, 160, 32, 1})->Args({4, 320, 320, 16, 1})->Args({4, 640, 320, 16, 1});
  benchmark->Args({4, 640, 640, 8, 1})->Args({4, 1280, 640, 8, 1})->Args({4, 640, 640, 4, 1});
  benchmark->Args({4, 1280, 640, 4, 1})->Args({1, 640, 640, 8, 1})->Args({16, 640, 640, 8, 1});
  benchmark->UseManualTime()->Unit(benchmark::kMillisecond);
}
// Kiln's gradient of the input has a stride of one.
void strided_shapes(benchmark::internal::Benchmark* benchmark) {
  shapes(benchmark);
  benchmark->Args({4, 320, 320, 16, 2})->Args({4, 640, 640, 8, 2});
}
BENCHMARK_CAPTURE(convolution, forward_bf16, at::kBFloat16, Part::kForward)->Apply(strided_shapes);
BENCHMARK_CAPTURE(convolution, grad_x_bf16, at::kBFloat16, Part::kGradX)->Apply(shapes);
BENCHMARK_CAPTURE(convolution, grad_weight_bf16, at::kBFloat16, Part::kGradWeight)->Apply(strided_shapes);
BENCHMARK_CAPTURE(convolution, forward_f32, at::kFloat, Part::kForward)->Apply(strided_shapes);
BENCHMARK_CAPTURE(convolution, grad_x_f32, at::kFloat, Part::kGradX)->Apply(shapes);
BENCHMARK_CAPTURE(convolution, grad_weight_f32, at::kFloat, Part::kGradWeight)->Apply(strided_shapes);

}  // namespace
}  // namespace kiln
