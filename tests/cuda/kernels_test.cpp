// The CUDA kernels against the CPU's. Needs a GPU and a build with them.

#include <array>
#include <cmath>
#include <limits>

#include "cuda/gpu_test.h"
#include "ops/attention.h"
#include "ops/checks.h"
#include "ops/gelu.h"
#include "ops/update/stochastic_round.h"

namespace kiln::ops {
namespace {

using GpuRounding = test::GpuTest;

class CudaKernels : public test::GpuTest, public ::testing::WithParamInterface<at::ScalarType> {
 protected:
  double rtol() const {
    return GetParam() == at::kFloat ? 1e-5 : GetParam() == at::kBFloat16 ? 1.0 / 128 : 1.0 / 1024;
  }

  // Result and gradients of `f` on the GPU are those on the CPU.
  void expect_agreement(const Function& f, const Tensors& inputs) {
    const Tensors on_gpu = each_to(at::kCUDA, inputs);
    const at::Tensor expected = f(inputs), direction = randn(expected.sizes(), expected.scalar_type(), 9);
    expect_close(f(on_gpu).cpu(), expected, rtol());
    const Tensors wanted = gradients(f, inputs, direction), got = gradients(f, on_gpu, direction);
    for (size_t i = 0; i < wanted.size(); ++i) expect_close(got[i].cpu(), wanted[i], rtol());
  }
};

TEST_P(CudaKernels, AdalnAndGatedResidual) {
  const at::ScalarType low = GetParam();
  for (int64_t width : {7, 72, 384, 1152}) {
    const at::Tensor x = randn({3, 70, width}, at::kFloat, 1), y = randn({3, 70, width}, low, 2);
    const at::Tensor chunks = randn({3, 6 * width}, low, 3);
    const at::Tensor shift = chunks.narrow(1, 0, width), scale = chunks.narrow(1, width, width);
    expect_agreement([=](const Tensors& in) { return adaln_modulate(in[0], in[1], in[2], 1e-6, low); },
                     {x, shift, scale});
    expect_agreement([](const Tensors& in) { return gated_residual(in[0], in[1], in[2]); }, {x, scale, y});
  }
}

TEST_P(CudaKernels, NormedResidual) {
  const at::ScalarType low = GetParam();
  for (int64_t width : {7, 72, 384, 1152}) {
    const at::Tensor x = randn({3, 70, width}, at::kFloat, 1), y = randn({3, 70, width}, low, 2);
    const at::Tensor modulation = randn({3, 3 * width}, low, 3);
    const auto part = [width](const Tensors& in, int64_t i) { return in[2].narrow(1, i * width, width); };
    const auto both = [](const NormedResidual& r) {
      return at::cat({r.x * 0.3, r.normed.to(at::kFloat)}, 1);
    };
    expect_agreement(
        [=](const Tensors& in) {
          return both(gated_residual_adaln(in[0], part(in, 0), in[1], part(in, 1), part(in, 2), 1e-6, low));
        },
        {x, y, modulation});
    expect_agreement(
        [=](const Tensors& in) { return both(adaln_branch(in[0], part(in, 1), part(in, 2), 1e-6, low)); },
        {x, y, modulation});
  }
}

// Through cuBLASLt's epilogues in low precision; shapes that they refuse go the composed way.
TEST_P(CudaKernels, LinearAndMlp) {
  const at::ScalarType low = GetParam();
  for (int64_t width : {64, 72, 7}) {
    const Tensors in = {randn({4, 33, width}, low, 1),
                        randn({4 * width, width}, low, 2) / std::sqrt(1.0 * width),
                        randn({4 * width}, low, 3),
                        randn({width, 4 * width}, low, 4) / std::sqrt(4.0 * width), randn({width}, low, 5)};
    expect_agreement([=](const Tensors& t) { return linear(t[0], t[1], t[2], low); }, {in[0], in[1], in[2]});
    expect_agreement(
        [=](const Tensors& t) {
          return gelu_tanh_mlp(t[0], {t[1], t[2], t[3], t[4]}, low);
        },
        in);
  }
}

// With all products of a layer timed, and the fastest taken; a choice that was made is taken again.
TEST_P(CudaKernels, TimedLinearAndMlp) {
  const at::ScalarType low = GetParam();
  cuda::take_epilogue_algorithm(cuda::kFastestEpilogueAlgorithm);
  const Tensors in = {randn({4, 33, 64}, low, 1), randn({256, 64}, low, 2) / 8, randn({256}, low, 3),
                      randn({64, 256}, low, 4) / 16, randn({64}, low, 5)};
  expect_agreement([=](const Tensors& t) { return linear(t[0], t[1], t[2], low); }, {in[0], in[1], in[2]});
  expect_agreement([=](const Tensors& t) { return gelu_tanh_mlp(t[0], {t[1], t[2], t[3], t[4]}, low); }, in);
  const size_t num_choices = cuda::product_choices().size();
  if (low != at::kFloat) {
    EXPECT_GT(num_choices, 0u);
  }
  expect_agreement([=](const Tensors& t) { return linear(t[0], t[1], t[2], low); }, {in[0], in[1], in[2]});
  EXPECT_EQ(cuda::product_choices().size(), num_choices);
  cuda::take_epilogue_algorithm(0);
}

// What a refused epilogue costs is not in the plan. cuBLASLt must serve the shapes of DiT-XL/2.
TEST_P(CudaKernels, EpiloguesServeTheWidthOfXl2) {
  if (GetParam() != at::kBFloat16 || cuda::capability() != 90) GTEST_SKIP() << "asserted for bf16 on 9.0";
  const int64_t width = 1152, hidden = 4 * width;
  const auto random = [](at::IntArrayRef sizes, uint64_t seed) {
    return testing::randn(sizes, at::kBFloat16, seed).to(at::kCUDA).requires_grad_();
  };
  const at::Tensor x = random({2, 256, width}, 1);
  const MlpWeights weights{random({hidden, width}, 2), random({hidden}, 3), random({width, hidden}, 4),
                           random({width}, 5)};
  const std::vector<cuda::EpilogueCount> before = cuda::epilogue_counts();
  const at::Tensor out = gelu_tanh_mlp(x, weights, at::kBFloat16);
  torch::autograd::grad({out}, {x, weights.weight_1, weights.bias_1, weights.weight_2, weights.bias_2},
                        {at::ones_like(out)});
  const std::vector<cuda::EpilogueCount> after = cuda::epilogue_counts();
  for (size_t i = 0; i < 3; ++i) {  // those with elementwise work
    EXPECT_GT(after[i].served, before[i].served) << after[i].product;
    EXPECT_EQ(after[i].refused, before[i].refused) << after[i].product;
  }
}

TEST_P(CudaKernels, PacksHeadGradients) {
  const at::Tensor q = randn({2, 9, 3, 72}, GetParam(), 1).to(at::kCUDA).transpose(1, 2),
                   k = randn({2, 3, 9, 72}, GetParam(), 2).to(at::kCUDA), v = q * 2;
  EXPECT_TRUE(at::equal(cuda::pack_heads(q, k, v),
                        at::stack({q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)}, 2)));
}

TEST_P(CudaKernels, GroupNormOfPictures) {
  for (const auto& [channels, height, width] :
       {std::array<int64_t, 3>{320, 33, 31}, {2560, 8, 8}, {64, 64, 64}, {30, 5, 7}})
    for (const bool silu : {true, false}) {
      const int64_t groups = channels == 30 ? 3 : 32;
      const at::Tensor x = randn({2, channels, height, width}, GetParam(), 1);
      expect_agreement(
          [=](const Tensors& in) { return group_norm_silu(in[0], groups, in[1], in[2], 1e-5, silu); },
          {x.contiguous(at::MemoryFormat::ChannelsLast), randn({channels}, GetParam(), 2),
           randn({channels}, GetParam(), 3)});
    }
}

TEST_P(CudaKernels, CudnnAttention) {
  if (GetParam() == at::kFloat || cuda::capability() < 80)
    GTEST_SKIP() << "cuDNN attends in bf16 and fp16, from 8.0";
  for (int64_t head_dim : {64, 72, 96}) {
    const at::Tensor qkv = randn({2, 64, 3, 2, head_dim}, GetParam(), 1), gpu = qkv.to(at::kCUDA);
    const double scale = 1 / std::sqrt(static_cast<double>(head_dim));
    const auto attend = [scale](const Tensors& in) { return reference::packed_attention(in[0], scale); };
    const Tensors wide{qkv.to(at::kDouble)};
    const AttentionResult result = cuda::cudnn_attention(gpu, scale);
    expect_close(result.out.cpu(), attend(wide), 2 * rtol());
    const at::Tensor grad = randn(result.out.sizes(), GetParam(), 2);
    const at::Tensor wanted = gradients(attend, wide, grad.to(at::kDouble))[0];
    const at::Tensor parts =
        cuda::packed(cuda::cudnn_attention_backward(grad.to(at::kCUDA), gpu, result, scale));
    expect_close(parts.cpu(), wanted, 3 * rtol());
    const at::Tensor whole = cuda::cudnn_packed_backward(grad.to(at::kCUDA), gpu, result, scale);
    ASSERT_TRUE(whole.defined()) << "cuDNN has no kernel that writes packed gradients";
    expect_close(whole.cpu(), wanted, 3 * rtol());
  }
}

TEST_P(CudaKernels, Fp8ProductsAreTheEmulatedOnes) {
  if (GetParam() != at::kBFloat16 || cuda::capability() < 89) GTEST_SKIP() << "fp8 begins at 8.9, under bf16";
  const at::Tensor x = randn({256, 512}, at::kBFloat16, 1), weight = randn({256, 512}, at::kBFloat16, 2),
                   bias = randn({256}, at::kBFloat16, 3);
  expect_agreement([](const Tensors& t) { return linear(t[0], t[1], t[2], at::kBFloat16, Products::kFp8); },
                   {x, weight, bias});
}

TEST_P(CudaKernels, StepScale) {
  const double inf = std::numeric_limits<double>::infinity();
  for (const double sum : {16.0, inf})
    for (const double limit : {0.0, 1.0}) {
      const at::Tensor losses = randn({300}, at::kDouble, 1), squares = at::scalar_tensor(sum, at::kDouble);
      const at::Tensor wanted = step_scale(squares, losses, limit, 2),
                       got = step_scale(squares.to(at::kCUDA), losses.to(at::kCUDA), limit, 2).cpu();
      EXPECT_TRUE(bitwise_equal(got, wanted) || (got.isnan() & wanted.isnan()).item<bool>());
    }
}

TEST_P(CudaKernels, Gelu) {
  for (int64_t n : {1, 7, 1024, 40001}) {
    const at::Tensor x = randn({n}, GetParam(), 1) * 3, gpu = x.to(at::kCUDA);
    at::Tensor out = at::empty_like(x), gpu_out = at::empty_like(gpu);
    gelu_tanh_forward(x, out);
    gelu_tanh_forward(gpu, gpu_out);
    expect_close(gpu_out.cpu(), out, rtol());
    gelu_tanh_backward(x, x, out);
    gelu_tanh_backward(gpu, gpu, gpu_out);
    expect_close(gpu_out.cpu(), out, rtol());
  }
}

TEST_P(CudaKernels, AdamwAndSumOfSquares) {
  const at::ScalarType compute_dtype = GetParam() == at::kHalf ? at::kHalf : at::kBFloat16;
  // Flat memory from `begin` on: 1 breaks the alignment of packed accesses. Six EMAs are more than one pass
  // takes.
  const auto run = [&](at::Device device, int64_t begin) {
    const auto flat = [&](uint64_t seed, at::ScalarType dtype = at::kFloat) {
      return randn({5004}, dtype, seed).to(device).slice(0, begin, 5003);
    };
    at::Tensor master = flat(1), m = flat(2), v = flat(3).square(), compute = flat(4, compute_dtype);
    std::vector<EmaSlice> emas;
    for (int k = 0; k < 6; ++k) emas.push_back({flat(10 + k), 1 - 0.1 * (k + 1)});
    const at::Tensor grad = flat(5, GetParam());
    adamw_ema_step_(master, grad, m, v, emas, &compute, adamw_options(0.5));
    return each_to(at::kCPU, {master, m, v, emas[0].weights, emas[5].weights, sum_of_squares(grad), compute});
  };
  for (int64_t begin : {0, 1}) {
    const Tensors expected = run(at::kCPU, begin), got = run(at::kCUDA, begin);
    for (size_t i = 0; i < expected.size(); ++i)
      expect_close(got[i], expected[i], i + 1 < expected.size() ? 1e-6 : 1.0 / 128);
  }
  EXPECT_TRUE(bitwise_equal(run(at::kCUDA, 0)[0].slice(0, 1), run(at::kCUDA, 1)[0]));
}

// A factor in device memory is one more of the gradient; where it is not finite nothing moves, of six EMAs
// neither.
TEST_P(CudaKernels, AdamwTakesAFactorFromTheDevice) {
  const auto run = [&](double grad_scale, const at::Tensor& factor) {
    const auto flat = [](uint64_t seed) { return randn({5003}, at::kFloat, seed).to(at::kCUDA); };
    at::Tensor master = flat(1), m = flat(2), v = flat(3).square(), compute = flat(4).to(at::kBFloat16);
    std::vector<EmaSlice> emas;
    for (int k = 0; k < 6; ++k) emas.push_back({flat(10 + k), 0.9});
    AdamWStep options = adamw_options(grad_scale);
    options.device_scale = factor;
    adamw_ema_step_(master, flat(5).to(GetParam()), m, v, emas, &compute, options);
    return Tensors{master, m, v, emas[0].weights, emas[5].weights, compute};
  };
  const Tensors expected = run(0.125, {}), got = run(1, at::full({}, 0.125f, at::TensorOptions(at::kCUDA)));
  expect_same_bits(got, expected);
  const Tensors untouched = run(1, at::full({}, std::nan(""), at::TensorOptions(at::kCUDA)));
  const auto before = [](uint64_t seed) { return randn({5003}, at::kFloat, seed); };
  const Tensors wanted{before(1),  before(2),  before(3).square(),
                       before(10), before(15), before(4).to(at::kBFloat16)};
  expect_same_bits(each_to(at::kCPU, untouched), wanted);
}

TEST_F(GpuRounding, HasTheBitsOfTheCpu) {
  const at::Tensor values = randn({100'003}, at::kFloat, 1);
  const RoundingDraw draw{.seed = 0x123456789ABCDEF0, .unit = 7, .update = 5, .first = 131};
  const at::Tensor expected = at::empty({100'003}, at::kBFloat16), got = expected.to(at::kCUDA);
  stochastic_round(values, expected, draw);
  stochastic_round(values.to(at::kCUDA), got, draw);
  EXPECT_TRUE(bitwise_equal(got.cpu(), expected));
}

INSTANTIATE_TEST_SUITE_P(Dtypes, CudaKernels, ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf));

}  // namespace
}  // namespace kiln::ops
