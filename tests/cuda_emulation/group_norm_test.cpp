// GroupNorm of channels-last pictures on the CPU from the kernels' own source, against the composed
// reference.
#include <cmath>
#include <limits>

#include "cuda_emulation/kernel_checks.h"
#include "ops/checks.h"
#include "ops/cuda/kernels.h"

namespace kiln::ops {
namespace {

struct PictureCase {
  int64_t batch, channels, height, width, groups;
  at::ScalarType dtype, affine_dtype;
  bool silu;
  int64_t shift = 0;  // elements by which pictures miss 16-byte alignment
};

class PictureKernels : public ::testing::TestWithParam<PictureCase> {
 protected:
  // A picture's memory, a row of channels for each pixel.
  static at::Tensor rows(const at::Tensor& values) {
    const PictureCase& c = GetParam();
    return shifted(values.view({c.batch, c.height * c.width, c.channels}), c.shift);
  }
  // The same as (B, C, H, W).
  static at::Tensor picture(const at::Tensor& rows) {
    const PictureCase& c = GetParam();
    return rows.view({c.batch, c.height, c.width, c.channels}).permute({0, 3, 1, 2});
  }
  static at::Tensor random(uint64_t seed) {
    const PictureCase& c = GetParam();
    return rows((randn({c.batch, c.height * c.width, c.channels}, at::kDouble, seed) * 2 + 1).to(c.dtype));
  }
  static at::Tensor unwritten() { return rows(poisoned(random(1).sizes(), GetParam().dtype)); }

  static GroupNormArgs args_of(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                               const at::Tensor& mean, const at::Tensor& rstd) {
    const PictureCase& c = GetParam();
    const auto pixels = static_cast<size_t>(c.height * c.width);
    return {.x = data(x),
            .dtype = dtype_of(x),
            .weight = data(weight),
            .bias = data(bias),
            .affine_dtype = dtype_of(weight),
            .num_groups = static_cast<size_t>(c.groups),
            .channels = static_cast<size_t>(c.channels),
            .pixels = pixels,
            .pixels_per_block = group_norm_pixels_per_block(pixels),
            .eps = 1e-6F,
            .silu = c.silu,
            .mean = mean.mutable_data_ptr<float>(),
            .rstd = rstd.mutable_data_ptr<float>()};
  }
};

TEST_P(PictureKernels, ForwardAndBackward) {
  const PictureCase& c = GetParam();
  const at::Tensor x = random(1), grad = random(2), weight = randn({c.channels}, c.affine_dtype, 3),
                   bias = randn({c.channels}, c.affine_dtype, 4);
  const int64_t pixels = c.height * c.width,
                blocks = at::divup(pixels, static_cast<int64_t>(group_norm_pixels_per_block(pixels)));
  const auto scratch = [](at::IntArrayRef sizes) { return poisoned(sizes, at::kFloat); };
  const Tensors got = in_both_orders([&] {
    const at::Tensor mean = scratch({c.batch, c.groups}), rstd = scratch({c.batch, c.groups});
    const GroupNormArgs args = args_of(x, weight, bias, mean, rstd);
    const at::Tensor out = unwritten(), moments = scratch({2, c.batch, blocks, c.groups});
    EXPECT_EQ(0, kiln_cuda_group_norm(&args, data(out), moments.mutable_data_ptr<float>(), c.batch, nullptr));
    const at::Tensor dx = unwritten(), dweight = poisoned({c.channels}, c.affine_dtype),
                     dbias = poisoned({c.channels}, c.affine_dtype);
    const at::Tensor partials = scratch({2, c.batch, blocks, c.channels}),
                     channel_sums = scratch({2, c.batch, c.channels}),
                     group_means = scratch({2, c.batch, c.groups});
    const GroupNormGradArgs grads{.out = data(grad),
                                  .x = data(dx),
                                  .weight = data(dweight),
                                  .bias = data(dbias),
                                  .partials = partials.mutable_data_ptr<float>(),
                                  .channel_sums = channel_sums.mutable_data_ptr<float>(),
                                  .group_means = group_means.mutable_data_ptr<float>()};
    EXPECT_EQ(0, kiln_cuda_group_norm_grad(&args, &grads, c.batch, nullptr));
    return Tensors{picture(out), picture(dx), dweight, dbias};
  });

  const auto normed = [&](const Tensors& in) {
    return reference::group_norm_silu(in[0], c.groups, in[1], in[2], 1e-6, c.silu);
  };
  const Tensors wide = in_f64({picture(x), weight, bias});
  const auto rtol = [](at::ScalarType dtype) { return 2 * tolerance_of(dtype); };
  expect_close(got[0], normed(wide), rtol(c.dtype));
  const Tensors wanted = gradients(normed, wide, picture(grad).to(at::kDouble));
  expect_close(got[1], wanted[0], rtol(c.dtype));
  for (size_t i = 1; i < wanted.size(); ++i) expect_close(got[i + 1], wanted[i], rtol(c.affine_dtype));
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, PictureKernels,
    ::testing::Values(PictureCase{2, 320, 5, 7, 32, kBf16, kBf16, true},  // 10 channels of a group
                      PictureCase{1, 2560, 3, 3, 32, kBf16, kBf16,
                                  true},                                 // the widest of Stable Diffusion 1.5
                      PictureCase{2, 64, 20, 27, 32, kF32, kF32, true},  // 32 pixels of a block, the last 28
                      PictureCase{1, 128, 9, 8, 32, kFp16, kF32, false},
                      PictureCase{2, 64, 3, 11, 8, kBf16, kF32, true, 1},  // not aligned
                      PictureCase{3, 30, 5, 3, 3, kF32, kBf16, true},      // channels without packs
                      PictureCase{1, 4096, 1, 2, 32, kBf16, kBf16, false},
                      PictureCase{1, 5, 1, 1, 1, kF32, kF32, true}));

// What a mean far from zero, or a NaN, does to a picture of 50 pixels and two groups of four channels.
class EmulatedGroupNorm : public ::testing::Test {
 protected:
  at::Tensor normed(const at::Tensor& x) {  // (50, 8)
    const at::Tensor one = at::ones({8}), zero = at::zeros({8}), out = at::empty_like(x),
                     statistics = at::empty({2, 2}), moments = at::empty({2, 50, 2});
    float* mean = statistics.mutable_data_ptr<float>();
    const GroupNormArgs args{data(x), Dtype::kF32, data(one), data(zero), Dtype::kF32, 2,       8,
                             50,      4,           1e-6F,     false,      mean,        mean + 2};
    EXPECT_EQ(0, kiln_cuda_group_norm(&args, data(out), moments.mutable_data_ptr<float>(), 1, nullptr));
    return out;
  }
};

TEST_F(EmulatedGroupNorm, KeepsDigitsWhenTheMeanIsFarFromZero) {
  const at::Tensor x = (randn({50, 8}) + 300).to(kF32);
  const at::Tensor wide = x.to(at::kDouble).t().reshape({1, 8, 50, 1});
  const at::Tensor expected = at::group_norm(wide, 2, at::ones({8}, at::kDouble), {}, 1e-6);
  expect_close(normed(x), expected.view({8, 50}).t(), 2e-5);
}

TEST_F(EmulatedGroupNorm, NanSpoilsItsGroupAlone) {
  at::Tensor x = randn({50, 8}, kF32);
  x[30][2].fill_(std::nan(""));
  const at::Tensor finite = normed(x).isfinite();
  EXPECT_FALSE(finite.narrow(1, 0, 4).any().item<bool>());
  EXPECT_EQ(finite.sum().item<int64_t>(), 4 * 50);
}

// A batch of 8 of Stable Diffusion's highest and lowest level, and frozen weights, which have no gradients.
TEST_F(EmulatedGroupNorm, GridsFillAnH100AtBatch8) {
  const auto blocks_of = [](size_t channels, size_t pixels) {
    GroupNormArgs args{};
    args.dtype = args.affine_dtype = Dtype::kBF16;
    args.num_groups = 32;
    args.channels = channels;
    args.pixels = pixels;
    args.pixels_per_block = group_norm_pixels_per_block(pixels);
    const GroupNormGradArgs grads{};
    return emulation::blocks_of([&] {
      kiln_cuda_group_norm(&args, nullptr, nullptr, 8, nullptr);
      kiln_cuda_group_norm_grad(&args, &grads, 8, nullptr);
    });
  };
  EXPECT_EQ(blocks_of(320, 4096), (std::vector<size_t>{1024, 64, 1024, 1024, 40, 64, 1024}));
  EXPECT_EQ(blocks_of(1280, 64), (std::vector<size_t>{128, 64, 128, 128, 160, 64, 128}));
}

}  // namespace
}  // namespace kiln::ops
