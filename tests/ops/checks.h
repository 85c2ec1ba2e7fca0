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
inline double tolerance_of(at::ScalarType dtype) {
  return dtype == kF32 ? 1e-5 : dtype == kBf16 ? 1.0 / 256 : 1.0 / 2048;
}

// N(0, 1) of a fixed seed, made in f64 on the CPU.
inline at::Tensor randn(at::IntArrayRef sizes, at::ScalarType dtype = at::kDouble, uint64_t seed = 1) {
  at::Generator generator = at::detail::createCPUGenerator(seed);
  return at::randn(sizes, generator, at::TensorOptions().dtype(at::kDouble)).to(dtype);
}

inline at::Tensor leaf(const at::Tensor& tensor) { return tensor.detach().clone().requires_grad_(); }

// max |a - b| <= rtol max |b| + atol, in f64.
inline void expect_close(const at::Tensor& actual, const at::Tensor& expected, double rtol, double atol = 0) {
  ASSERT_EQ(actual.sizes(), expected.sizes());
  if (actual.numel() == 0) {
    return;
  }
  const at::Tensor a = actual.detach().to(at::kDouble), e = expected.detach().to(at::kDouble);
  const double error = (a - e).abs().max().item<double>(), peak = e.abs().max().item<double>();
  EXPECT_TRUE(error <= rtol * peak + atol)
      << "error " << error << " of peak " << peak << ", allowed " << rtol;
}

inline bool bitwise_equal(const at::Tensor& a, const at::Tensor& b) {
  const auto bytes = [](const at::Tensor& t) { return t.detach().contiguous().view(-1).view(at::kByte); };
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() && at::equal(bytes(a), bytes(b));
}

// d sum(f(inputs) * direction) / d input, for every input.
inline Tensors gradients(const Function& f, const Tensors& inputs, const at::Tensor& direction) {
  Tensors leaves;
  for (const at::Tensor& input : inputs) {
    leaves.push_back(leaf(input));
  }
  const at::Tensor out = f(leaves);
  return torch::autograd::grad({out}, leaves, {direction.to(out.options())});
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

// The op on meta gives the shapes, strides and dtypes that it gives on real tensors, for its result and
// gradients.
inline void expect_meta_agrees(const Function& f, const Tensors& inputs) {
  Tensors on_meta;
  for (const at::Tensor& input : inputs) {
    at::Tensor twin = at::empty_strided(input.sizes(), input.strides(), input.options().device(at::kMeta));
    on_meta.push_back(twin);
  }
  const auto expect_same_layout = [](const at::Tensor& meta, const at::Tensor& real) {
    EXPECT_TRUE(meta.is_meta());
    EXPECT_EQ(meta.sizes(), real.sizes());
    EXPECT_EQ(meta.strides(), real.strides());
    EXPECT_EQ(meta.scalar_type(), real.scalar_type());
  };
  const auto run = [&](const Tensors& from) {
    Tensors leaves, results;
    for (const at::Tensor& input : from) {
      leaves.push_back(input.detach().requires_grad_());
    }
    const at::Tensor out = f(leaves);
    results = torch::autograd::grad({out}, leaves, {at::ones_like(out)});
    results.push_back(out);
    return results;
  };
  const Tensors real = run(inputs), meta = run(on_meta);
  for (size_t i = 0; i < real.size(); ++i) {
    expect_same_layout(meta[i], real[i]);
  }
}

// In a dry run of a GPU the op gives every input a gradient.
inline void expect_gradients_in_a_dry_run_of_cuda(const Function& f, const Tensors& inputs) {
  const DryRunScope dry_run(DryRunDevice::kCuda);
  Tensors leaves;
  for (const at::Tensor& input : inputs)
    leaves.push_back(at::empty_strided(input.sizes(), input.strides(), input.options().device(at::kMeta))
                         .requires_grad_());
  const at::Tensor out = f(leaves);
  ASSERT_TRUE(out.requires_grad()) << "the graph is cut";
  const Tensors gradients = torch::autograd::grad({out}, leaves, {at::ones_like(out)});
  for (size_t i = 0; i < inputs.size(); ++i) {
    EXPECT_EQ(gradients[i].sizes(), inputs[i].sizes()) << i;
    EXPECT_EQ(gradients[i].scalar_type(), inputs[i].scalar_type()) << i;
  }
}

// Result and gradients are the same bits with one thread and with several.
inline void expect_thread_count_does_not_matter(const Function& f, const Tensors& inputs) {
  const int threads = at::get_num_threads();
  std::vector<Tensors> runs;
  for (int n : {1, 2, 3}) {
    at::set_num_threads(n);
    Tensors leaves;
    for (const at::Tensor& input : inputs) {
      leaves.push_back(leaf(input));
    }
    const at::Tensor out = f(leaves);
    Tensors run = torch::autograd::grad({out}, leaves, {randn(out.sizes(), out.scalar_type(), 7)});
    run.push_back(out.detach());
    runs.push_back(run);
  }
  at::set_num_threads(threads);
  for (size_t r = 1; r < runs.size(); ++r) {
    for (size_t i = 0; i < runs[0].size(); ++i) {
      EXPECT_TRUE(bitwise_equal(runs[0][i], runs[r][i])) << "tensor " << i;
    }
  }
}

using kiln::test::message_of;

}  // namespace kiln::ops::testing

namespace kiln::ops {
using namespace testing;
}
