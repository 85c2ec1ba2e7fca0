// The CUDA kernels, run on the CPU from their own source, against the composed references: every index,
// barrier and order of sums, at shapes that end within a block, a pack and a warp.
#include "ops/cuda/kernels.h"

#include <cmath>
#include <limits>

#include "core/philox.h"
#include "core/tensors.h"
#include "cuda_emulation/kernel_checks.h"
#include "ops/checks.h"
#include "ops/fp8.h"
#include "ops/modulation.h"
#include "ops/update/stochastic_round.h"

namespace kiln::ops {
namespace {

struct RowCase {
  int64_t batch, num_tokens, width;
  at::ScalarType x_dtype, low;
  bool has_branch;
  int64_t shift = 0;  // elements by which x, y and gradients miss 16-byte alignment
};

class RowKernels : public ::testing::TestWithParam<RowCase> {
 protected:
  void SetUp() override {
    const RowCase& c = GetParam();
    const std::vector<int64_t> shape{c.batch, c.num_tokens, c.width};
    x = shifted(randn(shape, c.x_dtype, 1), c.shift);
    y = shifted(randn(shape, c.low, 2), c.shift);
    grad = shifted(randn(shape, c.low, 3), c.shift);
    around = shifted(randn(shape, c.x_dtype, 4), c.shift);
    const at::Tensor packed = randn({c.batch, 3 * c.width}, c.low, 5);  // chunks of a projection
    shift = packed.narrow(1, 0, c.width);
    scale = packed.narrow(1, c.width, c.width);
    gate = packed.narrow(1, 2 * c.width, c.width);
    num_partials = at::divup(c.num_tokens, kRowsPerPartialOnGpu);
  }

  at::Tensor unwritten(at::ScalarType dtype) const {
    return shifted(poisoned(x.sizes(), dtype), GetParam().shift);
  }
  at::Tensor unwritten_rows() const { return poisoned({x.size(0), x.size(2)}, GetParam().low); }
  double rtol(at::ScalarType dtype) const {
    return dtype == at::kFloat ? 2e-5 : dtype == at::kHalf ? 2e-3 : 1.6e-2;
  }

  AdalnArgs adaln_args(const at::Tensor& read, const at::Tensor& mean, const at::Tensor& rstd) const {
    return {.x = data(read),
            .x_dtype = dtype_of(x),
            .shift = data(shift),
            .scale = data(scale),
            .modulation_dtype = dtype_of(scale),
            .shift_stride = static_cast<size_t>(shift.stride(0)),
            .scale_stride = static_cast<size_t>(scale.stride(0)),
            .rows_per_batch = static_cast<size_t>(x.size(1)),
            .width = static_cast<size_t>(x.size(2)),
            .eps = 1e-6F,
            .mean = mean.mutable_data_ptr<float>(),
            .rstd = rstd.mutable_data_ptr<float>()};
  }
  GatedResidualArgs branch_args(bool has_branch) const {
    return {.gate = data(gate),
            .gate_dtype = dtype_of(gate),
            .gate_stride = static_cast<size_t>(gate.stride(0)),
            .y = has_branch ? data(y) : nullptr,
            .y_dtype = dtype_of(y),
            .rows_per_batch = static_cast<size_t>(x.size(1)),
            .width = static_cast<size_t>(x.size(2))};
  }

  at::Tensor x, y, grad, around, shift, scale, gate;
  int64_t num_partials = 0;
};

TEST_P(RowKernels, AdalnForwardAndBackward) {
  const RowCase& c = GetParam();
  const Tensors got = in_both_orders([&] {
    const at::Tensor sum = c.has_branch ? unwritten(c.x_dtype) : x, out = unwritten(c.low);
    const at::Tensor mean = poisoned({x.size(0), x.size(1)}, at::kFloat), rstd = mean.clone();
    const GatedResidualArgs branch = branch_args(c.has_branch);
    const AdalnArgs forward = adaln_args({}, mean, rstd);
    EXPECT_EQ(0, kiln_cuda_adaln(&forward, &branch, data(x), c.has_branch ? data(sum) : nullptr, data(out),
                                 dtype_of(out), c.batch, nullptr));
    const at::Tensor dx = unwritten(c.x_dtype), dy = c.has_branch ? unwritten(c.low) : at::Tensor();
    const at::Tensor dshift = unwritten_rows(), dscale = unwritten_rows(), dgate = unwritten_rows();
    const at::Tensor partials = poisoned({c.has_branch ? 3 : 2, c.batch, num_partials, c.width}, at::kFloat);
    const AdalnGrads grads{.out = data(grad),
                           .around = data(around),
                           .x = data(dx),
                           .shift = data(dshift),
                           .scale = data(dscale),
                           .y = data(dy),
                           .gate = data(dgate)};
    const AdalnArgs args = adaln_args(sum, mean, rstd);
    EXPECT_EQ(0,
              kiln_cuda_adaln_grad(&args, &branch, &grads, dtype_of(grad), partials.mutable_data_ptr<float>(),
                                   kRowsPerPartialOnGpu, c.batch, nullptr));
    Tensors results{sum, out, dx, dshift, dscale};
    if (c.has_branch) results.insert(results.end(), {dy, dgate});
    return results;
  });

  const auto wide = [](const at::Tensor& tensor) { return leaf(tensor.to(at::kDouble)); };
  Tensors leaves{wide(x), wide(shift), wide(scale)};
  if (c.has_branch) leaves.insert(leaves.end(), {wide(y), wide(gate)});
  const at::Tensor sum =
      c.has_branch ? reference::gated_residual(leaves[0], leaves[4], leaves[3]) : leaves[0];
  const at::Tensor out = reference::adaln_modulate(sum, leaves[1], leaves[2], 1e-6, at::kDouble);
  const Tensors wanted = torch::autograd::grad(
      {(out * grad.to(at::kDouble)).sum() + (sum * around.to(at::kDouble)).sum()}, {leaves});
  expect_close(got[0], sum, rtol(c.x_dtype));
  // The norm of what is stored: in a low precision that is another sum.
  const double of_stored = std::max(rtol(c.low), rtol(c.x_dtype));
  expect_close(got[1], out, of_stored);
  for (size_t i = 0; i < wanted.size(); ++i) expect_close(got[i + 2], wanted[i], of_stored);
}

TEST_P(RowKernels, GatedResidual) {
  const RowCase& c = GetParam();
  const GatedResidualArgs branch = branch_args(true);
  const Tensors got = in_both_orders([&] {
    const at::Tensor out = unwritten(c.x_dtype), dy = unwritten(c.low), dgate = unwritten_rows();
    const at::Tensor partials = poisoned({c.batch, num_partials, c.width}, at::kFloat);
    EXPECT_EQ(0, kiln_cuda_gated_residual(&branch, data(x), data(out), dtype_of(x), c.batch, nullptr));
    EXPECT_EQ(0, kiln_cuda_gated_residual_grad(&branch, data(around), dtype_of(around), data(dy), data(dgate),
                                               partials.mutable_data_ptr<float>(), kRowsPerPartialOnGpu,
                                               c.batch, nullptr));
    return Tensors{out, dgate, dy};
  });
  const auto run = [](const Tensors& in) { return reference::gated_residual(in[0], in[1], in[2]); };
  const Tensors inputs{x.to(at::kDouble), gate.to(at::kDouble), y.to(at::kDouble)};
  expect_close(got[0], run(inputs), rtol(c.x_dtype));
  const Tensors wanted = gradients(run, inputs, around.to(at::kDouble));
  expect_close(got[1], wanted[1], rtol(c.low));
  expect_close(got[2], wanted[2], rtol(c.low));
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, RowKernels,
    ::testing::Values(RowCase{2, 35, 1152, kF32, kBf16, true}, RowCase{1, 18, 1152, kF32, kBf16, false},
                      RowCase{3, 66, 72, kF32, kFp16, true}, RowCase{2, 33, 7, kF32, kF32, true},
                      RowCase{2, 33, 7, kF32, kBf16, false}, RowCase{1, 1, 384, kBf16, kBf16, true},
                      RowCase{2, 16, 384, kFp16, kFp16, false}, RowCase{2, 5, 264, kF32, kBf16, true, 1},
                      RowCase{1, 2, 4096, kF32, kBf16, true}, RowCase{1, 19, 1544, kF32, kBf16, true}));

// The blocks of each kernel for a batch of 8 with the 256 tokens of DiT-XL/2: the least batch at which an
// H100 is to be busy. Kernels on rows are the ones whose work is divided coarsely.
TEST(EmulatedKernels, GridsFillAnH100AtBatch8) {
  constexpr size_t kBatch = 8, kTokens = 256, kWidth = 1152, kHidden = 4 * kWidth, kWeights = 24 << 20;
  constexpr double kProcessors = 132;
  AdalnArgs norm{};
  GatedResidualArgs branch{};
  norm.modulation_dtype = branch.gate_dtype = branch.y_dtype = Dtype::kBF16;
  norm.rows_per_batch = branch.rows_per_batch = kTokens;
  norm.width = branch.width = kWidth;
  const AdalnGrads grads{};
  const HeadGrads heads{};
  const void* none = nullptr;
  struct Grid {
    const char* kernel;
    std::vector<size_t> blocks;  // of each launch
    std::function<void()> launch;
  };
  const Grid table[] = {
      {"adaLN",
       {128},
       [&] { kiln_cuda_adaln(&norm, &branch, none, nullptr, nullptr, Dtype::kBF16, kBatch, nullptr); }},
      {"adaLN backward, two column sums",
       {128, 144},
       [&] {
         kiln_cuda_adaln_grad(&norm, &branch, &grads, Dtype::kBF16, nullptr, kRowsPerPartialOnGpu, kBatch,
                              nullptr);
       }},
      {"gated residual",
       {128},
       [&] { kiln_cuda_gated_residual(&branch, none, nullptr, Dtype::kF32, kBatch, nullptr); }},
      {"gated residual backward, column sum",
       {128, 72},
       [&] {
         kiln_cuda_gated_residual_grad(&branch, none, Dtype::kF32, nullptr, nullptr, nullptr,
                                       kRowsPerPartialOnGpu, kBatch, nullptr);
       }},
      {"gelu",
       {4608},
       [&] { kiln_cuda_gelu_tanh(Dtype::kBF16, none, nullptr, kBatch * kTokens * kHidden, nullptr); }},
      {"packing the gradients of heads",
       {3456},
       [&] {
         kiln_cuda_pack_heads(&heads, Dtype::kBF16, nullptr, kBatch, kTokens, 16, kWidth / 16, nullptr);
       }},
      {"fp8: largest value, scale",
       {kFp8Partials, 1},
       [&] {
         kiln_cuda_fp8_scale(Dtype::kBF16, none, kBatch * kTokens * kWidth, 448, nullptr, nullptr, nullptr);
       }},
      {"fp8: conversion",
       {576},
       [&] {
         kiln_cuda_fp8_convert(Dtype::kBF16, none, kBatch * kTokens, kWidth, nullptr, false, nullptr, nullptr,
                               nullptr);
       }},
      {"sum of squares",
       {kSumOfSquaresPartials, 1},
       [&] { kiln_cuda_sum_of_squares(Dtype::kF32, none, kWeights, nullptr, nullptr, nullptr); }},
  };
  for (const Grid& row : table) {
    const std::vector<size_t> blocks = emulation::blocks_of(row.launch);
    EXPECT_EQ(blocks, row.blocks) << row.kernel;
    EXPECT_GE(static_cast<double>(blocks.at(0)), 0.95 * kProcessors) << row.kernel;
  }
}

TEST(EmulatedKernels, GeluMatchesTheReference) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (int64_t n : {1, 7, 1024, 5003}) {
      const at::Tensor x = randn({n}, dtype, 1) * 4, grad = randn({n}, dtype, 2);
      const at::Tensor out = poisoned({n}, dtype), dx = poisoned({n}, dtype);
      EXPECT_EQ(0, kiln_cuda_gelu_tanh(dtype_of(x), data(x), data(out), n, nullptr));
      EXPECT_EQ(0, kiln_cuda_gelu_tanh_grad(dtype_of(x), data(grad), data(x), data(dx), n, nullptr));
      const auto gelu = [](const Tensors& in) { return at::gelu(in[0], "tanh"); };
      const Tensors wide{x.to(at::kDouble)};
      expect_close(out, gelu(wide), tolerance_of(dtype));
      expect_close(dx, gradients(gelu, wide, grad.to(at::kDouble))[0], tolerance_of(dtype));
    }
  }
  const float inf = std::numeric_limits<float>::infinity();
  const at::Tensor ends = at::tensor({-1e30F, -60.0F, 60.0F, 1e30F, inf}), out = at::empty({5});
  kiln_cuda_gelu_tanh(Dtype::kF32, data(ends), data(out), 5, nullptr);
  EXPECT_TRUE(at::equal(out, at::tensor({0.0F, 0.0F, 60.0F, 1e30F, inf})));
}

// As cuDNN and flash attention leave them: each part (B, H, N, d) over memory of (B, N, H, d), or of its own
// order.
TEST(EmulatedKernels, PacksHeadGradients) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const int64_t head_dim : {72, 64, 6}) {
      const int64_t batch = 2, tokens = 9, heads = 3;
      const at::Tensor q = randn({batch, tokens, heads, head_dim}, dtype, 1).transpose(1, 2),
                       k = randn({batch, heads, tokens, head_dim}, dtype, 2),
                       v = randn({batch, tokens, 2, heads, head_dim}, dtype, 3).select(2, 1).transpose(1, 2);
      const at::Tensor packed = poisoned({batch, tokens, 3, heads, head_dim}, dtype);
      HeadGrads grads{};
      const Tensors parts{q, k, v};
      for (size_t i = 0; i < 3; ++i) {
        grads.data[i] = data(parts[i]);
        grads.batch_stride[i] = parts[i].stride(0);
        grads.head_stride[i] = parts[i].stride(1);
        grads.token_stride[i] = parts[i].stride(2);
      }
      EXPECT_EQ(0, kiln_cuda_pack_heads(&grads, dtype_of(q), data(packed), batch, tokens, heads, head_dim,
                                        nullptr));
      EXPECT_TRUE(at::equal(packed, at::stack({q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)}, 2)));
    }
  }
}

TEST(EmulatedKernels, SumOfSquares) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (int64_t begin : {0, 1}) {
      const at::Tensor values = randn({3000}, dtype, 1).slice(0, begin, 2999);
      const Tensors got = in_both_orders([&] {
        const at::Tensor partials = poisoned({kSumOfSquaresPartials}, at::kDouble),
                         sum = poisoned({1}, at::kDouble);
        EXPECT_EQ(0, kiln_cuda_sum_of_squares(dtype_of(values), data(values), values.numel(),
                                              partials.mutable_data_ptr<double>(),
                                              sum.mutable_data_ptr<double>(), nullptr));
        return Tensors{sum};
      });
      expect_close(got[0], values.to(at::kDouble).square().sum().reshape({1}), 1e-12);
    }
  }
}

float step_scale(double sum_of_squares, const std::vector<double>& losses, double max_norm,
                 double loss_scale) {
  float scale = 0;
  EXPECT_EQ(0, kiln_cuda_step_scale(&sum_of_squares, losses.data(), losses.size(), max_norm, loss_scale,
                                    &scale, nullptr));
  return scale;
}

TEST(EmulatedKernels, StepScaleClipsAndSkips) {
  const double inf = std::numeric_limits<double>::infinity();
  EXPECT_EQ(step_scale(16, {1, 2}, 0, 1), 1.0F);
  EXPECT_EQ(step_scale(16, {1, 2}, 1, 1), static_cast<float>(1 / (4 + 1e-6)));
  EXPECT_EQ(step_scale(16, {}, 8, 1), 1.0F);
  EXPECT_EQ(step_scale(16, {}, 1, 2), static_cast<float>(1 / (2 + 1e-6) / 2));
  EXPECT_TRUE(std::isnan(step_scale(inf, {1}, 1, 1)));
  std::vector<double> losses(1000, 0.5);
  losses[777] = std::nan("");
  EXPECT_TRUE(std::isnan(step_scale(16, losses, 0, 1)));
}

// AdamW reads its scale from the device, to the bits of one that is given; NaN moves nothing.
TEST(EmulatedKernels, AdamwScaleOnTheDevice) {
  const auto run = [](float given, const float* on_device) {
    at::Tensor master = randn({1003}, at::kFloat, 1), m = randn({1003}, at::kFloat, 2), v = m.square();
    const at::Tensor grad = randn({1003}, at::kBFloat16, 3), compute = at::zeros({1003}, at::kBFloat16);
    std::vector<at::Tensor> averages;
    std::vector<float*> emas;
    const std::vector<float> steps(6, 0.25F);
    for (int i = 0; i < 6; ++i) {
      averages.push_back(randn({1003}, at::kFloat, 9));
      emas.push_back(averages.back().mutable_data_ptr<float>());
    }
    const AdamwElements elements{.master = master.mutable_data_ptr<float>(),
                                 .grad = data(grad),
                                 .grad_dtype = Dtype::kBF16,
                                 .exp_avg = m.mutable_data_ptr<float>(),
                                 .exp_avg_sq = v.mutable_data_ptr<float>(),
                                 .compute_weights = data(compute),
                                 .compute_dtype = Dtype::kBF16,
                                 .emas = emas.data(),
                                 .ema_steps = steps.data(),
                                 .num_emas = 6,
                                 .device_scale = on_device};
    const AdamwFactors factors{given, 0.99F, 0.1F, 0.999F, 0.001F, 1e-3F, 2.0F, 1e-8F};
    EXPECT_EQ(0, kiln_cuda_adamw(&elements, &factors, 1003, nullptr));
    return Tensors{master, m, v, compute, averages[0], averages[5]};
  };
  const float half = 0.5F, nan = std::nanf("");
  const Tensors given = run(0.5F, nullptr), read = run(1.0F, &half), skipped = run(1.0F, &nan);
  expect_same_bits(given, read);
  EXPECT_TRUE(at::equal(skipped[0], randn({1003}, at::kFloat, 1)));
  EXPECT_TRUE(at::equal(skipped[3], at::zeros({1003}, at::kBFloat16)));
  for (size_t i : {4, 5}) EXPECT_TRUE(at::equal(skipped[i], randn({1003}, at::kFloat, 9)));
}

// The bits of the CPU, which are the reference's, wherever the values begin and end; NaN stays NaN.
TEST(EmulatedKernels, StochasticRoundingHasTheBitsOfTheCpu) {
  at::Tensor values = randn({2000}, at::kFloat, 1) * 3;
  values[70].fill_(std::nan(""));
  for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 2000}, {129, 1}, {1003, 640}, {7, 121}}) {
    const RoundingDraw draw{
        .seed = 0x123456789ABCDEF0, .unit = 7, .update = (int64_t{1} << 33) + 5, .first = first};
    const at::Tensor part = values.narrow(0, first == 0 ? 0 : 3, count);
    const Tensors got = in_both_orders([&, count = count] {
      const at::Tensor rounded = at::full({count + 1}, 5, at::kBFloat16);
      const uint64_t index = (static_cast<uint64_t>(draw.unit) << 40) + static_cast<uint64_t>(draw.update);
      EXPECT_EQ(
          0, kiln_cuda_stochastic_round(part.const_data_ptr<float>(), data(rounded), count, draw.first,
                                        draw.seed, static_cast<uint32_t>(Draw::kRounding), index, nullptr));
      return Tensors{rounded};
    });
    const at::Tensor expected = at::full({count + 1}, 5, at::kBFloat16);
    stochastic_round(part, expected.narrow(0, 0, count), draw);
    EXPECT_TRUE(bitwise_equal(got[0], expected)) << first << " " << count;
  }
}

// Both layouts are ATen's own conversion of the values, divided by the scale that ops/fp8.cpp takes on a CPU.
TEST(EmulatedKernels, Fp8Conversion) {
  for (const auto format : {at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
    for (const auto& [dtype, size] :
         {std::pair{at::kBFloat16, 1.0}, {at::kFloat, 3e-5}, {at::kBFloat16, 0.0}}) {
      const int64_t rows = 80, columns = 144;  // tiles that end within a block
      const at::Tensor values = (randn({rows, columns}, at::kFloat, 1) * size).to(dtype);
      const Fp8Tensor wanted = to_fp8(values, format, Fp8Layout::kBoth);
      const float largest = format == at::kFloat8_e4m3fn ? 448.0F : 57344.0F;
      const Tensors got = in_both_orders([&] {
        const at::Tensor partials = at::full({kFp8Partials}, 0x7fffffff, at::kInt),
                         scale = poisoned({1}, at::kFloat);
        const at::Tensor as_rows = at::full({rows, columns}, 0x7f, at::kByte),
                         as_columns = at::full({columns, rows}, 0x7f, at::kByte);
        EXPECT_EQ(0, kiln_cuda_fp8_scale(dtype_of(values), data(values), values.numel(), largest,
                                         static_cast<unsigned*>(data(partials)),
                                         scale.mutable_data_ptr<float>(), nullptr));
        EXPECT_EQ(0, kiln_cuda_fp8_convert(dtype_of(values), data(values), rows, columns,
                                           scale.const_data_ptr<float>(), format == at::kFloat8_e5m2,
                                           data(as_rows), data(as_columns), nullptr));
        return Tensors{scale, as_rows, as_columns};
      });
      EXPECT_EQ(got[0].item<float>(), wanted.scale.item<float>());
      EXPECT_TRUE(at::equal(got[1], wanted.values.view(at::kByte)));
      EXPECT_TRUE(at::equal(got[2], wanted.transposed.view(at::kByte)));
    }
  }
  const at::Tensor partials = at::zeros({kFp8Partials}, at::kInt);
  at::Tensor wrong = at::ones({16, 16});
  float scale = 0;
  for (const double value : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    wrong[3][5] = value;
    kiln_cuda_fp8_scale(Dtype::kF32, data(wrong), 256, 448, static_cast<unsigned*>(data(partials)), &scale,
                        nullptr);
    EXPECT_FALSE(std::isfinite(scale));
  }
}

TEST(Emulation, FindsBarriersThatSomeThreadsMiss) {
  EXPECT_THROW(emulation::run_uneven_barrier(), std::logic_error);
}

}  // namespace
}  // namespace kiln::ops
