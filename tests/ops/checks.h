// What the tests of fused ops share: comparison with a wider reference, numerical gradients, Meta against
// real.
#pragma once
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <vector>

#include "core/aten.h"
#include "core/dry_run.h"
#include "ops/ops.h"
#include "test_files.h"

namespace kiln::ops::testing {

using Tensors = std::vector<at::Tensor>;
using Function = std::function<at::Tensor(const Tensors&)>;

constexpr auto kF32 = at::kFloat, kBf16 = at::kBFloat16, kFp16 = at::kHalf;

// The share of the peak by which an elementwise op that computes in f32 may be off: one rounding to `dtype`.
// f64 goes the composed way, no kernel takes it.
inline double tolerance_of(at::ScalarType dtype) {
  return dtype == at::kDouble ? 1e-12 : dtype == kF32 ? 1e-5 : dtype == kBf16 ? 1.0 / 256 : 1.0 / 2048;
}

// N(0, 1) of a fixed seed, made in f64 on the CPU.
inline at::Tensor randn(at::IntArrayRef sizes, at::ScalarType dtype = at::kDouble, uint64_t seed = 1) {
  at::Generator generator = at::detail::createCPUGenerator(seed);
  return at::randn(sizes, generator, at::TensorOptions().dtype(at::kDouble)).to(dtype);
}

inline at::Tensor leaf(const at::Tensor& tensor) { return tensor.detach().clone().requires_grad_(); }
inline Tensors leaves_of(const Tensors& tensors) {
  Tensors leaves;
  for (const at::Tensor& tensor : tensors) leaves.push_back(leaf(tensor));
  return leaves;
}

// Each on a device, or in a dtype.
template <class Target>
Tensors each_to(const Target& target, const Tensors& tensors) {
  Tensors moved;
  for (const at::Tensor& tensor : tensors) moved.push_back(tensor.to(target));
  return moved;
}
inline Tensors in_f64(const Tensors& tensors) { return each_to(at::kDouble, tensors); }

inline AdamWStep adamw_options(double grad_scale = 1, int64_t step = 3) {
  return {.lr = 1e-3,
          .beta1 = 0.9,
          .beta2 = 0.999,
          .eps = 1e-8,
          .weight_decay = 0.1,
          .step = step,
          .grad_scale = grad_scale};
}

// max |a - b| <= rtol max |b| + atol, in f64.
inline void expect_close(const at::Tensor& actual, const at::Tensor& expected, double rtol, double atol = 0) {
  ASSERT_EQ(actual.sizes(), expected.sizes());
  if (actual.numel() == 0) return;
  const at::Tensor a = actual.detach().to(at::kDouble), e = expected.detach().to(at::kDouble);
  const double error = (a - e).abs().max().item<double>(), peak = e.abs().max().item<double>();
  EXPECT_TRUE(error <= rtol * peak + atol)
      << "error " << error << " of peak " << peak << ", allowed " << rtol;
}

inline bool bitwise_equal(const at::Tensor& a, const at::Tensor& b) {
  const auto bytes = [](const at::Tensor& t) { return t.detach().contiguous().view(-1).view(at::kByte); };
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() && at::equal(bytes(a), bytes(b));
}

inline void expect_same_bits(const Tensors& actual, const Tensors& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i)
    EXPECT_TRUE(bitwise_equal(actual[i], expected[i])) << "tensor " << i;
}

// d sum(f(inputs) * direction) / d input, for every input.
inline Tensors gradients(const Function& f, const Tensors& inputs, const at::Tensor& direction) {
  const Tensors leaves = leaves_of(inputs);
  const at::Tensor out = f(leaves);
  return torch::autograd::grad({out}, leaves, {direction.to(out.options())});
}

// By how many roundings results and gradients may be off, gradients by `atol` besides; the seed of the
// gradient that comes in.
struct Allowed {
  double result = 1, gradients = 1, atol = 0;
  uint64_t seed = 4;
};

// Result and gradients are those of `reference` in f64, the gradients in the dtypes of their inputs. The
// gradient that comes in is rounded to the result's dtype first: both then see the same one.
inline void expect_equals_reference(const Function& f, const Function& reference, const Tensors& inputs,
                                    const Allowed& allowed = {}) {
  const Tensors wide = in_f64(inputs);
  const at::Tensor out = f(inputs);
  expect_close(out, reference(wide), allowed.result * tolerance_of(out.scalar_type()));
  const at::Tensor direction = randn(out.sizes(), out.scalar_type(), allowed.seed);
  const Tensors got = gradients(f, inputs, direction), expected = gradients(reference, wide, direction);
  for (size_t i = 0; i < got.size(); ++i) {
    SCOPED_TRACE(::testing::Message() << "gradient " << i);
    EXPECT_EQ(got[i].scalar_type(), inputs[i].scalar_type());
    expect_close(got[i], expected[i], allowed.gradients * tolerance_of(inputs[i].scalar_type()),
                 allowed.atol);
  }
}

// Autograd against central differences, in f64.
inline void gradcheck(const Function& f, const Tensors& inputs) {
  at::Tensor direction;
  {
    at::NoGradGuard no_grad;
    direction = randn(f(inputs).sizes(), at::kDouble, 99);
  }
  const Tensors analytic = gradients(f, inputs, direction);
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensors moved = inputs;
    moved[i] = inputs[i].clone().contiguous();
    at::Tensor numeric = at::zeros(inputs[i].sizes(), inputs[i].options());
    double* value = moved[i].data_ptr<double>();
    for (int64_t j = 0; j < numeric.numel(); ++j) {
      const double original = value[j], h = 1e-5;
      value[j] = original + h;
      const double above = (f(moved) * direction).sum().item<double>();
      value[j] = original - h;
      const double below = (f(moved) * direction).sum().item<double>();
      value[j] = original;
      numeric.view(-1)[j] = (above - below) / (2 * h);
    }
    expect_close(analytic[i], numeric, 1e-6, 1e-9);
  }
}

inline Tensors on_meta(const Tensors& tensors) {
  Tensors twins;
  for (const at::Tensor& tensor : tensors)
    twins.push_back(at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta)));
  return twins;
}

// The op on meta gives the shapes, strides and dtypes that it gives on real tensors, for its result and
// gradients.
inline void expect_meta_agrees(const Function& f, const Tensors& inputs) {
  const auto run = [&](const Tensors& from) {
    Tensors leaves;
    for (const at::Tensor& input : from) leaves.push_back(input.detach().requires_grad_());
    const at::Tensor out = f(leaves);
    Tensors results = torch::autograd::grad({out}, leaves, {at::ones_like(out)});
    results.push_back(out);
    return results;
  };
  const Tensors real = run(inputs), meta = run(on_meta(inputs));
  for (size_t i = 0; i < real.size(); ++i) {
    SCOPED_TRACE(::testing::Message() << "tensor " << i);
    EXPECT_TRUE(meta[i].is_meta());
    EXPECT_EQ(meta[i].sizes(), real[i].sizes());
    EXPECT_EQ(meta[i].strides(), real[i].strides());
    EXPECT_EQ(meta[i].scalar_type(), real[i].scalar_type());
  }
}

// In a dry run of a GPU the op gives every input a gradient.
inline void expect_gradients_in_a_dry_run_of_cuda(const Function& f, const Tensors& inputs) {
  const DryRunScope dry_run(DryRunDevice::kCuda);
  const Tensors leaves = on_meta(inputs);
  for (const at::Tensor& leaf : leaves) leaf.requires_grad_();
  const at::Tensor out = f(leaves);
  ASSERT_TRUE(out.requires_grad()) << "the graph is cut";
  const Tensors gradients = torch::autograd::grad({out}, leaves, {at::ones_like(out)});
  for (size_t i = 0; i < inputs.size(); ++i) {
    EXPECT_EQ(gradients[i].sizes(), inputs[i].sizes()) << i;
    EXPECT_EQ(gradients[i].scalar_type(), inputs[i].scalar_type()) << i;
  }
}

// What `run` gives is the same bits with one thread and with several.
inline void expect_same_bits_on_threads(const std::function<Tensors()>& run) {
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const Tensors alone = run();
  for (const int threads : {2, 3, 5}) {
    SCOPED_TRACE(::testing::Message() << threads << " threads");
    at::set_num_threads(threads);
    expect_same_bits(run(), alone);
  }
  at::set_num_threads(before);
}

// So are a function's result and gradients.
inline void expect_thread_count_does_not_matter(const Function& f, const Tensors& inputs) {
  expect_same_bits_on_threads([&] {
    const Tensors leaves = leaves_of(inputs);
    const at::Tensor out = f(leaves);
    Tensors results = torch::autograd::grad({out}, leaves, {randn(out.sizes(), out.scalar_type(), 7)});
    results.push_back(out.detach());
    return results;
  });
}

using kiln::test::message_of;

}  // namespace kiln::ops::testing

namespace kiln::ops {
using namespace testing;
}
