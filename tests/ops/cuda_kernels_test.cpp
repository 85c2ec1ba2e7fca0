// The CUDA kernels against the CPU's. Needs a GPU and a build with them.

#include "core/aten.h"
#include "ops/checks.h"
#include "ops/cuda/launch.h"
#include "ops/gelu.h"
#include "ops/ops.h"

namespace kiln::ops {
namespace {

using testing::Tensors;

class CudaKernels : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  void SetUp() override {
    if (!at::hasCUDA() || !cuda::kernels_compiled()) {
      GTEST_SKIP() << "no GPU, or a build without CUDA";
    }
  }

  double rtol() const {
    return GetParam() == at::kFloat ? 1e-5 : GetParam() == at::kBFloat16 ? 1.0 / 128 : 1.0 / 1024;
  }

  // Result and gradients of `f` on the GPU are those on the CPU.
  void expect_agreement(const testing::Function& f, const Tensors& inputs) {
    Tensors on_gpu;
    for (const at::Tensor& input : inputs) {
      on_gpu.push_back(input.to(at::kCUDA));
    }
    const at::Tensor expected = f(inputs),
                     direction = testing::randn(expected.sizes(), expected.scalar_type(), 9);
    testing::expect_close(f(on_gpu).cpu(), expected, rtol());
    const Tensors wanted = testing::gradients(f, inputs, direction),
                  got = testing::gradients(f, on_gpu, direction);
    for (size_t i = 0; i < wanted.size(); ++i) {
      testing::expect_close(got[i].cpu(), wanted[i], rtol());
    }
  }
};

TEST_P(CudaKernels, AdalnAndGatedResidual) {
  const at::ScalarType low = GetParam();
  for (int64_t width : {7, 72, 384, 1152}) {
    const at::Tensor x = testing::randn({3, 70, width}, at::kFloat, 1),
                     y = testing::randn({3, 70, width}, low, 2);
    const at::Tensor chunks = testing::randn({3, 6 * width}, low, 3);
    const at::Tensor shift = chunks.narrow(1, 0, width), scale = chunks.narrow(1, width, width);
    expect_agreement([=](const Tensors& in) { return adaln_modulate(in[0], in[1], in[2], 1e-6, low); },
                     {x, shift, scale});
    expect_agreement([](const Tensors& in) { return gated_residual(in[0], in[1], in[2]); }, {x, scale, y});
  }
}

TEST_P(CudaKernels, Gelu) {
  for (int64_t n : {1, 7, 1024, 40001}) {
    const at::Tensor x = testing::randn({n}, GetParam(), 1) * 3, gpu = x.to(at::kCUDA);
    at::Tensor out = at::empty_like(x), gpu_out = at::empty_like(gpu);
    gelu_tanh_forward(x, out);
    gelu_tanh_forward(gpu, gpu_out);
    testing::expect_close(gpu_out.cpu(), out, rtol());
    gelu_tanh_backward(x, x, out);
    gelu_tanh_backward(gpu, gpu, gpu_out);
    testing::expect_close(gpu_out.cpu(), out, rtol());
  }
}

TEST_P(CudaKernels, AdamwAndSumOfSquares) {
  const AdamWStep options = {.lr = 1e-3,
                             .beta1 = 0.9,
                             .beta2 = 0.999,
                             .eps = 1e-8,
                             .weight_decay = 0.1,
                             .step = 3,
                             .grad_scale = 0.5};
  const at::ScalarType compute_dtype = GetParam() == at::kHalf ? at::kHalf : at::kBFloat16;
  // Flat memory from `begin` on: 1 breaks the alignment of packed accesses. Six EMAs are more than one pass
  // takes.
  const auto run = [&](at::Device device, int64_t begin) {
    const auto flat = [&](uint64_t seed, at::ScalarType dtype = at::kFloat) {
      return testing::randn({5004}, dtype, seed).to(device).slice(0, begin, 5003);
    };
    at::Tensor master = flat(1), m = flat(2), v = flat(3).square(), compute = flat(4, compute_dtype);
    std::vector<EmaSlice> emas;
    for (int k = 0; k < 6; ++k) {
      emas.push_back({flat(10 + k), 1 - 0.1 * (k + 1)});
    }
    const at::Tensor grad = flat(5, GetParam());
    adamw_ema_step_(master, grad, m, v, emas, &compute, options);
    return Tensors{master.cpu(),
                   m.cpu(),
                   v.cpu(),
                   emas[0].weights.cpu(),
                   emas[5].weights.cpu(),
                   sum_of_squares(grad).cpu(),
                   compute.cpu()};
  };
  for (int64_t begin : {0, 1}) {
    const Tensors expected = run(at::kCPU, begin), got = run(at::kCUDA, begin);
    for (size_t i = 0; i < expected.size(); ++i) {
      testing::expect_close(got[i], expected[i], i + 1 < expected.size() ? 1e-6 : 1.0 / 128);
    }
  }
  EXPECT_TRUE(testing::bitwise_equal(run(at::kCUDA, 0)[0].slice(0, 1), run(at::kCUDA, 1)[0]));
}

INSTANTIATE_TEST_SUITE_P(Dtypes, CudaKernels, ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf));

}  // namespace
}  // namespace kiln::ops
