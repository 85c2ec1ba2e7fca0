#include <cmath>
#include <limits>

#include "ops/checks.h"

namespace kiln::ops {
namespace {

using namespace testing;

// An operation, its oracle, and inputs of it.
struct FeatureOp {
  const char* name;
  Function op, oracle;
  std::vector<std::vector<std::vector<int64_t>>> shapes;
};

const FeatureOp kFeatureOps[] = {
    {"rms_norm",
     [](const Tensors& in) { return rms_norm(in[0], in[1], in[2], 1e-5); },
     [](const Tensors& in) { return reference::rms_norm(in[0], in[1], in[2], 1e-5); },
     {{{1, 1}, {1}, {1}}, {{3, 5, 7}, {7}, {7}}, {{2, 33, 128}, {128}, {128}}, {{70, 1029}, {1029}, {1029}}}},
    {"rms_norm without a bias",
     [](const Tensors& in) { return rms_norm(in[0], in[1], {}, 1e-5); },
     [](const Tensors& in) { return reference::rms_norm(in[0], in[1], {}, 1e-5); },
     {{{3, 5, 7}, {7}}, {{2, 33, 128}, {128}}}},
    {"silu",
     [](const Tensors& in) { return ops::silu(in[0]); },
     [](const Tensors& in) { return at::silu(in[0]); },
     {{{1}}, {{3, 5, 7}}, {{2, 20000}}}},
    {"pixels_to_channels",
     [](const Tensors& in) { return pixels_to_channels(in[0]); },
     [](const Tensors& in) { return at::pixel_unshuffle(in[0], 2); },
     {{{1, 1, 2, 2}}, {{2, 3, 4, 6}}, {{1, 64, 2, 4}}, {{2, 37, 6, 2}}}},
    {"mean_of_channels",
     [](const Tensors& in) { return mean_of_channels(in[0], in[0].size(1) / 12); },
     [](const Tensors& in) {
       return in[0].unflatten(1, {in[0].size(1) / 12, -1}).mean(2);
     },
     {{{1, 12, 1, 1}}, {{2, 24, 2, 3}}, {{1, 192, 3, 5}}}},
    {"channels_to_pixels of repeated channels",
     [](const Tensors& in) { return channels_to_pixels(in[0], 32 / in[0].size(2)); },
     [](const Tensors& in) {
       return at::pixel_shuffle(at::repeat_interleave(in[0], 32 / in[0].size(2), 1), 2);
     },
     {{{1, 6, 16, 1}}, {{2, 3, 8, 2}}, {{1, 74, 16, 1}}, {{1, 64, 8, 1}}, {{1, 2, 4, 3}}}},
    {"channels_to_pixels",
     [](const Tensors& in) { return channels_to_pixels(in[0]); },
     [](const Tensors& in) { return at::pixel_shuffle(in[0], 2); },
     {{{1, 4, 1, 1}}, {{2, 12, 2, 3}}, {{1, 256, 1, 2}}, {{2, 148, 3, 1}}}},
};

// Pictures are channels-last, as autoencoders have them.
Tensors feature_inputs(const std::vector<std::vector<int64_t>>& shapes, at::ScalarType dtype) {
  Tensors inputs;
  for (size_t i = 0; i < shapes.size(); ++i) {
    inputs.push_back(randn(shapes[i], dtype, i + 1));
    if (inputs[i].dim() == 4) inputs[i] = inputs[i].contiguous(at::MemoryFormat::ChannelsLast);
  }
  return inputs;
}

// Calls body(case, inputs) for every case, its shapes and dtypes.
template <class Body>
void for_each_feature_op(const Body& body) {
  for (const FeatureOp& each : kFeatureOps)
    for (const auto& shapes : each.shapes)
      for (const auto dtype : {kF32, kBf16, kFp16}) {
        SCOPED_TRACE(::testing::Message() << each.name << " " << shapes[0] << " " << dtype);
        body(each, feature_inputs(shapes, dtype));
      }
}

TEST(Features, OnePassEqualsItsReference) {
  for_each_feature_op([](const FeatureOp& of, const Tensors& inputs) {
    const at::NoGradGuard no_grad;
    const at::Tensor out = of.op(inputs), expected = of.oracle(in_f64(inputs));
    EXPECT_EQ(out.scalar_type(), inputs[0].scalar_type());
    expect_close(out, expected, tolerance_of(out.scalar_type()));
    if (out.dim() != 4) return;
    EXPECT_TRUE(out.is_contiguous(at::MemoryFormat::ChannelsLast));
    const bool is_moved = out.numel() >= inputs[0].numel();
    EXPECT_TRUE(!is_moved || at::equal(out.to(at::kDouble), expected)) << "values are moved, not computed";
  });
}

TEST(Features, InfinityAndNanPass) {
  const at::NoGradGuard no_grad;
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const at::Tensor x = at::tensor({inf, nan, 88.0f, -200.0f}), out = ops::silu(x);
  EXPECT_EQ(out[0].item<float>(), inf);
  EXPECT_TRUE(std::isnan(out[1].item<float>()));
  EXPECT_EQ(out[2].item<float>(), 88.0f);
  EXPECT_EQ(out[3].item<float>(), 0.0f);
  EXPECT_TRUE(std::isnan(rms_norm(x, at::ones(4), at::ones(4), 1e-5)[1].item<float>()));
}

TEST(Features, HaveGradients) {
  for (const FeatureOp& each : kFeatureOps) {
    SCOPED_TRACE(each.name);
    expect_equals_reference(each.op, each.oracle, feature_inputs(each.shapes[1], kF32));
    gradcheck(each.op, feature_inputs(each.shapes[1], at::kDouble));
  }
}

TEST(Features, TheNumberOfThreadsDoesNotMatter) {
  for_each_feature_op([](const FeatureOp& of, const Tensors& inputs) {
    expect_same_bits_on_threads([&] {
      const at::NoGradGuard no_grad;
      return Tensors{of.op(inputs)};
    });
  });
}

// In a dry run of a CPU, with a gradient and without, as on one.
TEST(Features, MetaAgrees) {
  const DryRunScope dry_run(DryRunDevice::kCpu);
  for (const FeatureOp& each : kFeatureOps) {
    SCOPED_TRACE(each.name);
    const Tensors inputs = feature_inputs(each.shapes[1], kBf16);
    expect_meta_agrees(each.op, inputs);
    const at::NoGradGuard no_grad;
    const at::Tensor real = each.op(inputs), meta = each.op(on_meta(inputs));
    EXPECT_EQ(meta.sizes(), real.sizes());
    EXPECT_EQ(meta.strides(), real.strides());
    EXPECT_EQ(meta.scalar_type(), real.scalar_type());
  }
}

TEST(Features, WrongShapesAreRefused) {
  EXPECT_ERROR(pixels_to_channels(at::zeros({1, 3, 4, 5})), "x (B, C, H, W) of even sides, got 1x3x4x5");
  EXPECT_ERROR(channels_to_pixels(at::zeros({1, 6, 4, 4})), "x (B, 4 C / 1, H, W), got 1x6x4x4");
  EXPECT_ERROR(mean_of_channels(at::zeros({1, 6, 4, 4}), 4), "C a multiple of 4, got 1x6x4x4");
  EXPECT_ERROR(rms_norm(at::zeros({2, 4}), at::zeros(3), at::zeros(4), 1e-5),
               "weight and bias (D), got 2x4, 3 and 4");
}

}  // namespace
}  // namespace kiln::ops
