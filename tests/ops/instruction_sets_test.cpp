// Every instruction set that this processor has gives the results of the best one.
#include <hwy/targets.h>

#include "ops/checks.h"
#include "ops/gelu.h"
#include "ops/pictures/convolution.h"

namespace kiln::ops {
namespace {

class InstructionSets : public ::testing::Test {
 protected:
  void TearDown() override { hwy::GetChosenTarget().Update(hwy::SupportedTargets()); }

  // The results of `f` by AVX-512, AVX2 and portable code, as far as the processor has them.
  static std::vector<Tensors> on_each(const std::function<Tensors()>& f) {
    std::vector<Tensors> results;
    for (int64_t target : {HWY_AVX3, HWY_AVX2, HWY_SCALAR}) {
      if ((hwy::SupportedTargets() & target) != 0 || target == HWY_SCALAR) {
        hwy::GetChosenTarget().Update(target);
        results.push_back(f());
      }
    }
    return results;
  }

  static void expect_agreement(const std::function<Tensors()>& f, double rtol) {
    const std::vector<Tensors> results = on_each(f);
    for (size_t r = 1; r < results.size(); ++r) {
      for (size_t i = 0; i < results[0].size(); ++i) {
        expect_close(results[r][i], results[0][i], rtol);
      }
    }
  }
};

TEST_F(InstructionSets, AdalnAndGatedResidual) {
  for (auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const at::Tensor x = randn({2, 40, 71}, at::kFloat, 1), rows = randn({2, 71}, dtype, 2);
    const at::Tensor y = randn({2, 40, 71}, dtype, 3);
    const double rtol = dtype == at::kFloat ? 1e-5 : 1.0 / 128;
    expect_agreement(
        [&] {
          return gradients(
              [&](const Tensors& in) { return adaln_modulate(in[0], in[1], in[1], 1e-6, dtype); }, {x, rows},
              y);
        },
        rtol);
    expect_agreement(
        [&] {
          return gradients([](const Tensors& in) { return gated_residual(in[0], in[1], in[2]); },
                           {x, rows, y}, x);
        },
        rtol);
  }
}

TEST_F(InstructionSets, GeluAndGroupNorm) {
  for (auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const at::Tensor x = randn({1, 12, 9, 11}, dtype, 1) * 3;
    const at::Tensor affine = randn({12}, at::kFloat, 2);
    const double rtol = dtype == at::kFloat ? 1e-5 : 1.0 / 128;
    expect_agreement(
        [&] {
          at::Tensor out = at::empty_like(x), grad = at::empty_like(x);
          gelu_tanh_forward(x, out);
          gelu_tanh_backward(x, x, grad);
          return Tensors{out, grad};
        },
        rtol);
    const at::Tensor grad = randn({1, 12, 9, 5}, dtype, 3), h = x.narrow(-1, 0, 10).contiguous();
    expect_agreement([&] { return Tensors{geglu_forward(h), geglu_backward(grad, h)}; }, rtol);
    expect_agreement(
        [&] {
          return Tensors{
              group_norm_silu(x, 3, affine, affine, 1e-6, true),
              group_norm_silu(x.contiguous(at::MemoryFormat::ChannelsLast), 3, affine, affine, 1e-6, true)};
        },
        rtol);
    const auto normed = [](const Tensors& in) { return group_norm_silu(in[0], 3, in[1], in[1], 1e-6, true); };
    expect_agreement(
        [&] {
          return gradients(normed, {x.contiguous(at::MemoryFormat::ChannelsLast), affine}, randn(x.sizes()));
        },
        rtol);
  }
}

TEST_F(InstructionSets, Features) {
  const at::NoGradGuard no_grad;
  for (auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const at::Tensor x = randn({2, 76, 4, 6}, dtype, 1).contiguous(at::MemoryFormat::ChannelsLast),
                     weight = randn({6}, at::kFloat, 2);
    expect_agreement(
        [&] {
          return Tensors{ops::silu(x), rms_norm(x, weight, weight, 1e-5), mean_of_channels(x, 38),
                         mean_of_channels(x, 19)};
        },
        dtype == at::kFloat ? 1e-5 : 1.0 / 128);
    expect_agreement(
        [&] {
          return Tensors{pixels_to_channels(x), channels_to_pixels(x), channels_to_pixels(x, 2),
                         channels_to_pixels(x, 4)};
        },
        0);
  }
}

TEST_F(InstructionSets, Convolution) {
  for (auto dtype : {at::kFloat, at::kBFloat16}) {
    const at::Tensor x = randn({2, 70, 9, 7}, dtype, 1).contiguous(at::MemoryFormat::ChannelsLast);
    const Function convolved = [=](const Tensors& in) {
      return conv2d(in[0], in[1], in[2], {.padding = 1}, dtype);
    };
    const Tensors inputs = {x, randn({50, 70, 3, 3}, dtype, 2), randn({50}, dtype, 3)};
    expect_agreement(
        [&] {
          Tensors all = gradients(convolved, inputs, randn({2, 50, 9, 7}, dtype, 4));
          all.push_back(convolved(inputs));
          return all;
        },
        dtype == at::kFloat ? 1e-5 : 1.0 / 128);
  }
}

// Of every instruction set, whichever part a processor takes from another library.
TEST_F(InstructionSets, ConvolutionOfPatches) {
  const auto pixels = [&](int64_t channels, uint64_t seed) {
    return randn({2, channels, 9, 7}, kF32, seed).contiguous(at::MemoryFormat::ChannelsLast);
  };
  const at::Tensor x = pixels(70, 1), grad = pixels(50, 2), weight = randn({50, 70, 3, 3}, kF32, 3),
                   bias = randn({50}, kF32, 4);
  expect_agreement(
      [&] {
        return Tensors{conv_forward(x, weight, bias, {.padding = 1}),
                       conv_grad_x(grad, x.sizes(), weight, {.padding = 1})};
      },
      1e-5);
}

TEST_F(InstructionSets, GradientOfAConvolutionsWeight) {
  for (auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const auto pixels = [&](int64_t channels, uint64_t seed) {
      return randn({2, channels, 9, 7}, dtype, seed).contiguous(at::MemoryFormat::ChannelsLast);
    };
    const at::Tensor x = pixels(70, 1), grad = pixels(50, 2), weight = at::empty({50, 70, 3, 3});
    expect_agreement([&] { return Tensors{conv_grad_weight(grad, x, weight, {.padding = 1})}; },
                     dtype == at::kFloat ? 1e-5 : 1.0 / 128);
  }
}

// Of few rows, and of enough for kernels that have them across their vectors.
TEST_F(InstructionSets, RaggedAttention) {
  for (auto dtype : {at::kFloat, at::kBFloat16, at::kHalf})
    for (const int64_t rows : {13, 70}) {
      const at::Tensor q = randn({2, 70, 2, 22}, dtype, 1), k = randn({rows + 1, 2, 22}, dtype, 2),
                       v = randn({rows + 1, 2, 22}, dtype, 3);
      const auto attended = [=](const Tensors& in) {
        return ragged_attention(in[0], in[1], in[2], {0, rows, rows + 1}, 0.2);
      };
      expect_agreement(
          [&] {
            Tensors results = gradients(attended, {q, k, v}, randn({2, 70, 44}, at::kFloat, 4));
            results.push_back(attended({q, k, v}));
            return results;
          },
          dtype == at::kFloat ? 1e-5 : 1.0 / 64);
    }
}

TEST_F(InstructionSets, PackedAttention) {
  for (auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const at::Tensor qkv = randn({1, 230, 3, 2, 22}, dtype, 1);
    const auto attended = [](const Tensors& in) { return packed_attention(in[0], 0.2); };
    expect_agreement(
        [&] {
          Tensors results = gradients(attended, {qkv}, randn({1, 230, 44}, at::kFloat, 4));
          results.push_back(attended({qkv}));
          return results;
        },
        dtype == at::kFloat ? 1e-5 : 1.0 / 64);
  }
}

TEST_F(InstructionSets, SumOfSquaresIsBitwiseTheSame) {
  const at::Tensor g = randn({70001}, at::kFloat, 1);
  const std::vector<Tensors> results = on_each([&] {
    return Tensors{sum_of_squares(g), sum_of_squares(g.to(at::kBFloat16))};
  });
  for (const Tensors& other : results) expect_same_bits(other, results[0]);
}

TEST_F(InstructionSets, Adamw) {
  for (auto dtype : {at::kBFloat16, at::kHalf}) {
    expect_agreement(
        [&] {
          at::Tensor master = randn({101}, at::kFloat, 1), m = randn({101}, at::kFloat, 2);
          at::Tensor v = randn({101}, at::kFloat, 3).square(), compute = at::zeros({101}, dtype);
          std::vector<EmaSlice> emas = {{randn({101}, at::kFloat, 4), 0.99}};
          adamw_ema_step_(master, randn({101}, dtype, 5), m, v, emas, &compute, adamw_options());
          EXPECT_TRUE(bitwise_equal(compute, master.to(dtype)));
          return Tensors{master, m, v, emas[0].weights};
        },
        1e-6);
  }
}

}  // namespace
}  // namespace kiln::ops
