// Fused operations that reach the GPU through ATen: against the CPU's in f64, forward and gradients.

#include <cmath>

#include "cuda/gpu_test.h"
#include "ops/attention.h"
#include "ops/caption_attention.h"
#include "ops/checks.h"

namespace kiln::ops {
namespace {

using test::kGpu;

class CudaOps : public test::GpuTest, public ::testing::WithParamInterface<at::ScalarType> {
 protected:
  // A share of the peak: some roundings of the dtype.
  double rtol() const {
    return GetParam() == at::kFloat ? 2e-5 : GetParam() == at::kBFloat16 ? 1.6e-2 : 2e-3;
  }

  // `reference` in f64 on the CPU, on the inputs as they are rounded.
  void expect_reference(const Function& f, const Function& reference, const Tensors& inputs) const {
    const Tensors on_gpu = each_to(kGpu, inputs), wide = in_f64(inputs);
    const at::Tensor expected = reference(wide);
    expect_close(f(on_gpu).cpu(), expected, rtol());
    const at::Tensor direction = randn(expected.sizes(), GetParam(), 9);
    const Tensors wanted = gradients(reference, wide, direction),
                  got = gradients(f, on_gpu, direction.to(kGpu));
    for (size_t i = 0; i < wanted.size(); ++i) {
      SCOPED_TRACE(::testing::Message() << "gradient " << i);
      expect_close(got[i].cpu(), wanted[i], rtol());
    }
  }
};

TEST_P(CudaOps, Linear) {
  const at::ScalarType low = GetParam();
  for (const auto& [rows, in, out] : {std::array<int64_t, 3>{1, 8, 8}, {70, 72, 216}, {333, 384, 1536}}) {
    const Tensors inputs{randn({rows, in}, low, 1), randn({out, in}, low, 2) * 0.05, randn({out}, low, 3)};
    expect_reference([=](const Tensors& x) { return linear(x[0], x[1], x[2], low); },
                     [](const Tensors& x) { return reference::linear(x[0], x[1], x[2], at::kDouble); },
                     inputs);
    expect_reference(
        [=](const Tensors& x) { return gelu_tanh_linear(x[0], x[1], x[2], low); },
        [](const Tensors& x) { return reference::gelu_tanh_linear(x[0], x[1], x[2], at::kDouble); }, inputs);
  }
}

// A long sum that cuBLAS divides: its parts are added up in f32.
TEST_P(CudaOps, LongProductsAccumulateInF32) {
  const at::ScalarType low = GetParam();
  const at::Tensor x = at::full({64, 1 << 16}, 1.0, at::TensorOptions(low)), w = at::full_like(x, 1.0 / 4096);
  const at::Tensor product = linear(x.to(kGpu), w.to(kGpu), {}, low);
  EXPECT_EQ(product.min().item<double>(), 16);
  EXPECT_EQ(product.max().item<double>(), 16);
}

TEST_P(CudaOps, EmbeddingRows) {
  const at::Tensor ids = at::tensor({3, 0, 3, 3, 9}, at::kLong);
  expect_reference([&](const Tensors& x) { return embedding_rows(x[0], ids.to(x[0].device())); },
                   [&](const Tensors& x) { return reference::embedding_rows(x[0], ids); },
                   {randn({10, 384}, GetParam(), 1)});
}

TEST_P(CudaOps, GroupNormSilu) {
  for (const bool silu : {false, true})
    for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
      const Tensors inputs{randn({2, 64, 9, 7}, GetParam(), 1).contiguous(format), randn({64}, GetParam(), 2),
                           randn({64}, GetParam(), 3)};
      expect_reference(
          [&](const Tensors& x) { return group_norm_silu(x[0], 32, x[1], x[2], 1e-6, silu); },
          [&](const Tensors& x) { return reference::group_norm_silu(x[0], 32, x[1], x[2], 1e-6, silu); },
          inputs);
    }
}

TEST_P(CudaOps, LayerNormWithAnF32Affine) {
  const auto normed = [](auto&& norm) {
    return [norm](const Tensors& x) {
      return norm(x[0], x[1].to(at::kFloat), x[2].to(at::kFloat), 1e-5, x[0].scalar_type());
    };
  };
  expect_reference(
      normed(layer_norm), normed(reference::layer_norm),
      {randn({2, 9, 64}, GetParam(), 1), randn({64}, GetParam(), 2), randn({64}, GetParam(), 3)});
}

// Captions of several lengths in one call, one of them empty, and rows that nobody has: against the loop over
// samples. Widths that no kernel takes go through the loop itself.
TEST_P(CudaOps, AttentionToCaptions) {
  for (const int64_t head_dim : {64, 72, 112, 7}) {
    const std::vector<int64_t> offsets{0, 5, 5, 125, 128};
    const at::Tensor on_gpu = at::tensor(offsets, at::kInt).to(kGpu);
    const double scale = 1 / std::sqrt(static_cast<double>(head_dim));
    const auto captions = [&](const Tensors& x, bool composed) {
      const at::Tensor k = x[1].select(1, 0), v = x[1].select(1, 1);
      return composed ? reference::ragged_attention(x[0], k, v, offsets, scale)
                      : caption_attention(x[0], k, v, offsets, on_gpu, scale);
    };
    expect_reference(
        [&](const Tensors& x) { return captions(x, false); },
        [&](const Tensors& x) { return captions(x, true); },
        {randn({4, 100, 3, head_dim}, GetParam(), 1), randn({130, 2, 3, head_dim}, GetParam(), 2)});
  }
}

TEST_P(CudaOps, AttentionToAsManyRows) {
  const auto samples = [](const at::Tensor& x) { return x.view({3, 77, 2, 40}); };
  expect_reference([&](const Tensors& x) { return cross_attention(x[0], samples(x[1]), samples(x[2]), 0.2); },
                   [&](const Tensors& x) {
                     return reference::ragged_attention(x[0], x[1], x[2], {0, 77, 154, 231}, 0.2);
                   },
                   {randn({3, 64, 2, 40}, GetParam(), 1), randn({231, 2, 40}, GetParam(), 2),
                    randn({231, 2, 40}, GetParam(), 3)});
}

INSTANTIATE_TEST_SUITE_P(Dtypes, CudaOps, ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf));

// Which of torch's attention kernels may be chosen, while this lives.
class OnlyBackend {
 public:
  explicit OnlyBackend(AttentionEngine engine) {
    at::Context& context = at::globalContext();
    context.setSDPUseFlash(engine == AttentionEngine::kFlash);
    context.setSDPUseCuDNN(engine == AttentionEngine::kCudnn);
    context.setSDPUseMemEfficient(engine == AttentionEngine::kMemoryEfficient);
  }
  ~OnlyBackend() {
    at::Context& context = at::globalContext();
    context.setSDPUseFlash(true);
    context.setSDPUseCuDNN(true);
    context.setSDPUseMemEfficient(true);
  }
  OnlyBackend(const OnlyBackend&) = delete;
};

class CudaAttention
    : public test::GpuTest,
      public ::testing::WithParamInterface<std::tuple<AttentionEngine, at::ScalarType, int64_t>> {};

// Every engine that this GPU has for the shape. Backward takes forward's, whatever torch would choose by
// then.
TEST_P(CudaAttention, MatchesTheReference) {
  const auto [engine, dtype, head_dim] = GetParam();
  const test::AnyOrder any_order;
  const double scale = 1 / std::sqrt(static_cast<double>(head_dim));
  const double rtol = dtype == at::kFloat ? 2e-5 : dtype == at::kBFloat16 ? 1.6e-2 : 2e-3;
  for (const int64_t num_tokens : {16, 100, 256}) {
    const at::Tensor values = randn({2, num_tokens, 3, 4, head_dim}, dtype, 1);
    const at::Tensor qkv = leaf(values.to(kGpu)), wide = leaf(values.to(at::kDouble));
    at::Tensor out;
    {
      const OnlyBackend only(engine);
      const OpChoicesScope choices({.pack_gradients = num_tokens != 16});
      if (cuda::attention_engine(qkv, scale) != engine) GTEST_SKIP() << "this GPU has no such kernel";
      out = packed_attention(qkv, scale);
    }
    const at::Tensor expected = reference::packed_attention(wide, scale);
    expect_close(out.cpu(), expected, rtol);
    const at::Tensor direction = randn(expected.sizes(), dtype, 5);
    const OnlyBackend none(AttentionEngine::kNone);
    const at::Tensor grad = torch::autograd::grad({out}, {qkv}, {direction.to(kGpu)})[0].cpu(),
                     wanted = torch::autograd::grad({expected}, {wide}, {direction.to(at::kDouble)})[0];
    for (int64_t part = 0; part < 3; ++part) expect_close(grad.select(2, part), wanted.select(2, part), rtol);
  }
}

std::string name_of_case(const ::testing::TestParamInfo<CudaAttention::ParamType>& info) {
  constexpr const char* kEngines[] = {"none", "cpu", "flash", "cudnn", "efficient"};
  const auto [engine, dtype, head_dim] = info.param;
  return fmt::format("{}_{}_{}", kEngines[static_cast<size_t>(engine)], c10::toString(dtype), head_dim);
}
INSTANTIATE_TEST_SUITE_P(Engines, CudaAttention,
                         ::testing::Combine(::testing::Values(AttentionEngine::kFlash,
                                                              AttentionEngine::kCudnn,
                                                              AttentionEngine::kMemoryEfficient),
                                            ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf),
                                            ::testing::Values(64, 72, 96)),
                         name_of_case);

using CudaAttentionOrder = test::GpuTest;

// --deterministic: the same bits every time.
TEST_F(CudaAttentionOrder, IsTheSameEveryTimeWhereThatIsAskedFor) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const at::Tensor qkv = leaf(randn({4, 256, 3, 16, 72}, dtype, 1).to(kGpu));
    const at::Tensor direction = randn({4, 256, 16 * 72}, dtype, 2).to(kGpu);
    const auto gradient = [&] {
      return torch::autograd::grad({packed_attention(qkv, 0.1)}, {qkv}, {direction})[0];
    };
    const at::Tensor first = gradient();
    for (int repeat = 0; repeat < 5; ++repeat) EXPECT_TRUE(bitwise_equal(gradient(), first));
  }
}

// Where no fused kernel takes the shape, the composed reference does.
TEST_F(CudaAttentionOrder, OddHeadWidthsAreComposed) {
  const at::Tensor qkv = randn({2, 9, 3, 2, 7}, at::kFloat, 1);
  expect_close(packed_attention(qkv.to(kGpu), 0.3).cpu(), packed_attention(qkv, 0.3), 2e-5);
}

}  // namespace
}  // namespace kiln::ops
