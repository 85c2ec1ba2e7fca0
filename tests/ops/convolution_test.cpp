// conv2d where a CPU only stores the compute dtype, behind a norm, and by Kiln's own kernels.
#include "ops/pictures/convolution.h"
#include "ops/checks.h"
#include "ops/gradient_memory.h"

namespace kiln::ops {
namespace {

constexpr ConvolutionShape kShape{.stride = 2, .padding = 1, .groups = 1};

struct Operands {
  at::Tensor x = randn({2, 8, 9, 9}, at::kFloat, 1).requires_grad_();
  at::Tensor weight = randn({12, 8, 3, 3}, at::kFloat, 2).requires_grad_();
  at::Tensor bias = randn({12}, at::kFloat, 3).requires_grad_();
};

// Casts to the stored dtype and back, and convolves in f32.
at::Tensor composed(const Operands& in, at::ScalarType stored) {
  const auto cast = [&](const at::Tensor& tensor) { return tensor.to(stored).to(at::kFloat); };
  return at::conv2d(cast(in.x), cast(in.weight), cast(in.bias), {2, 2}, {1, 1}).to(stored);
}

TEST(Convolution, InStoredDtypeIsThatOfF32) {
  const Operands fused, slow;
  const at::Tensor y = conv2d(fused.x, fused.weight, fused.bias, kShape, at::kHalf),
                   want = composed(slow, at::kHalf), grad = randn({2, 12, 5, 5}, at::kHalf, 4);
  EXPECT_EQ(y.scalar_type(), at::kHalf);
  EXPECT_TRUE(at::equal(y, want));
  y.backward(grad);
  want.backward(grad);
  EXPECT_TRUE(at::equal(fused.x.grad(), slow.x.grad()));
  EXPECT_TRUE(at::equal(fused.weight.grad(), slow.weight.grad()));
  EXPECT_TRUE(at::equal(fused.bias.grad(), slow.bias.grad()));
}

TEST(Convolution, FrozenPassesTheGradientOn) {
  const Operands trained;
  Operands frozen;
  frozen.weight = trained.weight.detach();
  frozen.bias = trained.bias.detach();
  const at::Tensor grad = randn({2, 12, 5, 5}, at::kHalf, 4);
  for (const at::ScalarType dtype : {at::kHalf, at::kFloat}) {
    trained.x.mutable_grad() = at::Tensor();
    frozen.x.mutable_grad() = at::Tensor();
    conv2d(trained.x, trained.weight, trained.bias, kShape, dtype).backward(grad.to(dtype));
    conv2d(frozen.x, frozen.weight, frozen.bias, kShape, dtype).backward(grad.to(dtype));
    EXPECT_TRUE(at::equal(trained.x.grad(), frozen.x.grad())) << dtype;
  }
}

// Kiln's own 3x3 convolutions

struct OwnCase {
  int64_t batch, in, out, height, width, padding, stride = 1;
};

class OwnConvolution : public ::testing::TestWithParam<OwnCase> {
 protected:
  const OwnCase c_ = GetParam();
  const ConvolutionShape shape_{.stride = c_.stride, .padding = c_.padding};
  const at::Tensor weight_ = randn({c_.out, c_.in, 3, 3}, kF32, 3), bias_ = randn({c_.out}, kF32, 4);

  at::Tensor x(at::ScalarType dtype) const {
    return randn({c_.batch, c_.in, c_.height, c_.width}, dtype, 1).contiguous(at::MemoryFormat::ChannelsLast);
  }
  at::Tensor grad(at::ScalarType dtype) const {
    const auto side = [&](int64_t size) { return (size + 2 * c_.padding - 3) / c_.stride + 1; };
    return randn({c_.batch, c_.out, side(c_.height), side(c_.width)}, dtype, 2)
        .contiguous(at::MemoryFormat::ChannelsLast);
  }
  // The gradients of x and of the weight that ATen computes in f64.
  Tensors wanted(at::ScalarType dtype) const {
    const auto [of_x, of_weight, none] = at::convolution_backward(
        grad(dtype).to(at::kDouble), x(dtype).to(at::kDouble), weight_.to(dtype).to(at::kDouble),
        std::nullopt, {c_.stride, c_.stride}, {c_.padding, c_.padding}, {1, 1}, /*transposed=*/false, {0, 0},
        /*groups=*/1, {true, true, false});
    return {of_x, of_weight};
  }
  // The dtypes in which this processor has kernels of forward and of the gradient of x, for any number of
  // pixels.
  std::vector<at::ScalarType> served() const {
    std::vector<at::ScalarType> dtypes;
    for (const at::ScalarType dtype : {kF32, kBf16}) {
      const at::Tensor pixel = at::zeros({1, 16, 3, 3}, dtype).contiguous(at::MemoryFormat::ChannelsLast);
      const bool has_channels = dtype == kF32 || (c_.in % 2 == 0 && c_.out % 2 == 0);
      if (has_channels && has_conv_forward(pixel, at::zeros({16, 16, 3, 3}, dtype), {.padding = 1}))
        dtypes.push_back(dtype);
    }
    return dtypes;
  }
};

TEST_P(OwnConvolution, ForwardAndGradientOfTheInputAreThoseOfATenInF64) {
  for (const at::ScalarType dtype : served()) {
    SCOPED_TRACE(::testing::Message() << dtype);
    const at::Tensor weight = weight_.to(dtype), bias = bias_.to(dtype);
    const at::Tensor got = conv_forward(x(dtype), weight, bias, shape_);
    EXPECT_TRUE(got.is_contiguous(at::MemoryFormat::ChannelsLast));
    expect_close(got,
                 at::conv2d(x(dtype).to(at::kDouble), weight.to(at::kDouble), bias.to(at::kDouble),
                            {c_.stride, c_.stride}, {c_.padding, c_.padding}),
                 tolerance_of(dtype));
    const at::Tensor without = conv_forward(x(dtype), weight, std::nullopt, shape_);
    expect_close(without,
                 at::conv2d(x(dtype).to(at::kDouble), weight.to(at::kDouble), {}, {c_.stride, c_.stride},
                            {c_.padding, c_.padding}),
                 tolerance_of(dtype));
    if (c_.stride > 1) continue;
    const at::Tensor of_x = conv_grad_x(grad(dtype), x(dtype).sizes(), weight, shape_);
    EXPECT_TRUE(of_x.is_contiguous(at::MemoryFormat::ChannelsLast));
    expect_close(of_x, wanted(dtype)[0], tolerance_of(dtype));
  }
}

TEST_P(OwnConvolution, GradientOfTheWeightIsThatOfATenInF64) {
  for (const at::ScalarType dtype : {kF32, kBf16, kFp16}) {
    if (c_.stride > 1 && !has_conv_grad_weight(x(dtype), weight_.to(dtype), shape_)) continue;
    SCOPED_TRACE(::testing::Message() << dtype);
    const at::Tensor got = conv_grad_weight(grad(dtype), x(dtype), weight_, shape_);
    EXPECT_EQ(got.scalar_type(), dtype);
    EXPECT_TRUE(got.is_contiguous());
    expect_close(got, wanted(dtype)[1], tolerance_of(dtype));
  }
}

TEST_P(OwnConvolution, ThreadCountDoesNotMatter) {
  const bool has_forward = std::ranges::count(served(), kF32) > 0;
  expect_same_bits_on_threads([&] {
    Tensors parts;
    if (has_forward) parts.push_back(conv_forward(x(kF32), weight_, bias_, shape_));
    if (has_forward && c_.stride == 1)
      parts.push_back(conv_grad_x(grad(kF32), x(kF32).sizes(), weight_, shape_));
    if (c_.stride == 1 || has_conv_grad_weight(x(kF32), weight_, shape_))
      parts.push_back(conv_grad_weight(grad(kF32), x(kF32), weight_, shape_));
    return parts;
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, OwnConvolution,
                         ::testing::Values(OwnCase{2, 5, 7, 9, 6, 1}, OwnCase{3, 70, 100, 5, 11, 1},
                                           OwnCase{1, 33, 50, 12, 7, 0}, OwnCase{2, 16, 48, 3, 3, 0},
                                           OwnCase{1, 1, 1, 1, 1, 1}, OwnCase{2, 160, 96, 20, 20, 1},
                                           OwnCase{2, 17, 20, 40, 5, 2}, OwnCase{2, 20, 17, 2, 127, 1},
                                           OwnCase{2, 20, 17, 2, 300, 1}, OwnCase{1, 2, 2, 1, 1, 1},
                                           OwnCase{3, 38, 130, 9, 7, 1, 2}, OwnCase{2, 150, 34, 8, 8, 1, 2},
                                           OwnCase{4, 64, 6, 4, 4, 1}, OwnCase{1, 66, 54, 4, 12, 2}));

TEST(Convolution, WritesTheGradientOfItsWeightWhereItIsKept) {
  const at::Tensor x = randn({2, 16, 6, 5}, kF32, 1).contiguous(at::MemoryFormat::ChannelsLast),
                   grad = randn({2, 8, 6, 5}, kF32, 2).contiguous(at::MemoryFormat::ChannelsLast),
                   weight = leaf(randn({8, 16, 3, 3}, kF32, 3)), memory = at::full({8, 16, 3, 3}, 7);
  const ConvolutionShape same{.padding = 1};
  const at::Tensor apart = conv_grad_weight(grad, x, weight, same);
  lend_gradient_memory(weight, memory.to(kF32));
  const at::Tensor lent = weight.grad();
  EXPECT_TRUE(conv_grad_weight(grad, x, weight, same).is_same(lent));
  EXPECT_TRUE(bitwise_equal(lent, apart));
}

// All gradients of a 3x3 convolution as a U-Net has it, by whichever kernel this processor takes.
TEST(Convolution, GradientsMatchF64) {
  for (const at::ScalarType dtype : {kF32, kBf16, kFp16}) {
    SCOPED_TRACE(::testing::Message() << dtype);
    const Function f = [](const Tensors& in) {
      return conv2d(in[0], in[1], in[2], {.padding = 1}, in[0].scalar_type());
    };
    expect_equals_reference(f, f,
                            {randn({2, 20, 7, 9}, dtype, 1).contiguous(at::MemoryFormat::ChannelsLast),
                             randn({24, 20, 3, 3}, dtype, 2), randn({24}, dtype, 3)},
                            {.gradients = 2});
  }
}

// Behind a norm

struct NormedCase {
  at::ScalarType dtype;
  int64_t kernel;
  bool silu;
};

class NormedConvolution : public ::testing::TestWithParam<NormedCase> {
 protected:
  const NormedCase c_ = GetParam();
  const ConvolutionShape shape_{.stride = 1, .padding = c_.kernel / 2, .groups = 1};
  // x, the norm's weight and bias, the convolution's
  const Tensors inputs_ = {randn({2, 24, 7, 5}, c_.dtype, 1).contiguous(at::MemoryFormat::ChannelsLast),
                           randn({24}, c_.dtype, 2), randn({24}, c_.dtype, 3),
                           randn({20, 24, c_.kernel, c_.kernel}, c_.dtype, 4), randn({20}, c_.dtype, 5)};

  Function fused() const {
    return [c = c_, shape = shape_](const Tensors& in) {
      return group_norm_conv2d(in[0], {in[1], in[2], /*num_groups=*/4, /*eps=*/1e-5, c.silu}, in[3], in[4],
                               shape, c.dtype);
    };
  }
  Function apart() const {
    return [c = c_, shape = shape_](const Tensors& in) {
      return conv2d(group_norm_silu(in[0], 4, in[1], in[2], 1e-5, c.silu), in[3], in[4], shape, c.dtype);
    };
  }
};

TEST_P(NormedConvolution, IsBitwiseTheTwoOperations) {
  const at::Tensor out = fused()(inputs_), direction = randn(out.sizes(), c_.dtype, 6);
  expect_same_bits({out}, {apart()(inputs_)});
  expect_same_bits(gradients(fused(), inputs_, direction), gradients(apart(), inputs_, direction));
}

TEST_P(NormedConvolution, FrozenPassesTheGradientOn) {
  const at::Tensor direction = randn(fused()(inputs_).sizes(), c_.dtype, 6);
  const Function frozen = [&](const Tensors& in) {
    return fused()({in[0], in[1], in[2], inputs_[3], inputs_[4]});
  };
  const Tensors all = gradients(fused(), inputs_, direction);
  expect_same_bits(gradients(frozen, {inputs_[0], inputs_[1], inputs_[2]}, direction),
                   {all[0], all[1], all[2]});
}

TEST_P(NormedConvolution, MetaAgrees) { expect_meta_agrees(fused(), inputs_); }

TEST_P(NormedConvolution, HasABackwardInADryRunOfCuda) {
  expect_gradients_in_a_dry_run_of_cuda(fused(), inputs_);
}

INSTANTIATE_TEST_SUITE_P(Kinds, NormedConvolution,
                         ::testing::Values(NormedCase{kF32, 3, true}, NormedCase{kBf16, 3, true},
                                           NormedCase{kFp16, 3, true}, NormedCase{kF32, 1, false},
                                           NormedCase{kBf16, 1, false}, NormedCase{at::kDouble, 3, true}));

TEST(NormedConvolutions, NameWhatIsWrong) {
  const at::Tensor x = at::zeros({1, 6, 2, 2}), affine = at::ones({6}), weight = at::ones({4, 6, 3, 3});
  EXPECT_ERROR(group_norm_conv2d(x, {affine, affine, 4, 1e-6, true}, weight, std::nullopt, {}, kF32),
               "the number of groups must divide the 6 channels, got 4");
  EXPECT_ERROR(
      group_norm_conv2d(x, {affine, affine, 3, 1e-6, true}, weight.narrow(1, 0, 5), std::nullopt, {}, kF32),
      "expected x (B, C, H, W) and weight (out, C / 1, k, k), got 1x6x2x2 and 4x5x3x3");
}

}  // namespace
}  // namespace kiln::ops
