// A whole denoiser on meta: no kernel is missing, and every shape is that of a real run.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "models/registry.h"

namespace kiln {
namespace {

// The prediction and the gradient of every trainable weight.
std::vector<at::Tensor> run(at::Device device, at::ScalarType compute_dtype) {
  const auto model =
      build_denoiser("DiT-S/8", {{"depth", 2}}, {.compute_dtype = compute_dtype, .device = device});
  const auto shape = model->shape();
  std::vector<at::Tensor> weights;
  for (const auto& parameter : model->parameters()) {
    if (!parameter->trainable) continue;
    parameter->value = at::zeros(parameter->value.sizes(), at::TensorOptions(device).dtype(compute_dtype));
    weights.push_back(parameter->value.requires_grad_());
  }
  const at::TensorOptions options(device);
  const at::Tensor prediction =
      model->forward({.x_t = at::zeros({3, shape.in_channels, shape.input_size, shape.input_size}, options),
                      .timesteps = at::zeros({3}, options),
                      .class_labels = at::zeros({3}, options.dtype(at::kLong)),
                      .text_embeds = {},
                      .text_mask = {}});
  std::vector<at::Tensor> results = torch::autograd::grad({prediction}, weights, {at::ones_like(prediction)});
  results.push_back(prediction);
  return results;
}

TEST(Meta, DitForwardAndBackwardHaveTheRealShapes) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const auto meta = run(at::kMeta, dtype), real = run(at::kCPU, dtype);
    ASSERT_EQ(meta.size(), real.size());
    for (size_t i = 0; i < meta.size(); ++i) {
      EXPECT_TRUE(meta[i].is_meta());
      EXPECT_EQ(meta[i].sizes(), real[i].sizes());
      EXPECT_EQ(meta[i].strides(), real[i].strides());
      EXPECT_EQ(meta[i].scalar_type(), real[i].scalar_type());
    }
  }
}

}  // namespace
}  // namespace kiln
