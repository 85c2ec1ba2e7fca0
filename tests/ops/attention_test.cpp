#include <ATen/SDPBackend.h>
#include <hwy/targets.h>

#include <cmath>

#include "core/allocations.h"
#include "ops/attention.h"
#include "ops/checks.h"

namespace kiln::ops {
namespace {

struct AttentionCase {
  int64_t batch, num_tokens, num_heads, head_dim;
  double scale() const { return 1 / std::sqrt(static_cast<double>(head_dim)); }
  at::Tensor qkv(at::ScalarType dtype, double spread = 1) const {
    return (randn({batch, num_tokens, 3, num_heads, head_dim}) * spread).to(dtype);
  }
  at::Tensor direction(at::ScalarType dtype) const {
    return randn({batch, num_tokens, num_heads * head_dim}, dtype, 5);
  }
};

// The op against the composed reference in f64 on the same (rounded) numbers: output, dq, dk and dv each
// within `rtol` of its own peak, or `atol`.
void expect_reference(const AttentionCase& c, at::ScalarType dtype, double rtol, double spread = 1,
                      double atol = 0) {
  SCOPED_TRACE(::testing::Message() << c.batch << "x" << c.num_tokens << "x" << c.num_heads << "x"
                                    << c.head_dim << " " << c10::toString(dtype));
  const at::Tensor qkv = leaf(c.qkv(dtype, spread)), wide = leaf(qkv.to(at::kDouble));
  const at::Tensor out = packed_attention(qkv, c.scale()),
                   expected = reference::packed_attention(wide, c.scale());
  EXPECT_EQ(out.scalar_type(), dtype);
  expect_close(out, expected, rtol);
  const at::Tensor direction = c.direction(dtype);
  const at::Tensor grad = torch::autograd::grad({out}, {qkv}, {direction})[0];
  const at::Tensor expected_grad = torch::autograd::grad({expected}, {wide}, {direction.to(at::kDouble)})[0];
  EXPECT_EQ(grad.scalar_type(), dtype);
  // The gradient of q and k is 0 in theory when there is a single key: only rounding of grad_out remains.
  if (c.num_tokens == 1) atol = rtol;
  for (int64_t part = 0; part < 3; ++part)
    expect_close(grad.select(2, part), expected_grad.select(2, part), rtol, atol);
}

constexpr double kAllowedF32 = 5e-6, kAllowedBf16 = 1.2e-2, kAllowedFp16 = 2e-3;

void expect_reference_in_every_dtype(const AttentionCase& c) {
  expect_reference(c, at::kFloat, kAllowedF32);
  expect_reference(c, at::kBFloat16, kAllowedBf16);
  expect_reference(c, at::kHalf, kAllowedFp16);
}

TEST(PackedAttention, MatchesTheReferenceForEveryHeadSize) {
  for (const int64_t head_dim : {1, 2, 7, 16, 64, 72, 80, 96, 112, 128, 144, 200})
    expect_reference_in_every_dtype({2, 33, 2, head_dim});
}

TEST(PackedAttention, MatchesTheReferenceForRaggedLengths) {
  for (const int64_t num_tokens : {1, 2, 5, 17, 31, 64, 65, 96, 97, 193, 256, 1000}) {
    expect_reference({1, num_tokens, 1, 72}, at::kFloat, kAllowedF32);
    expect_reference({1, num_tokens, 6, 64}, at::kBFloat16, kAllowedBf16);
  }
}

TEST(PackedAttention, GradientIsExactInF64) {
  const auto attention = [](const Tensors& in) { return packed_attention(in[0], 0.6); };
  gradcheck(attention, {AttentionCase{2, 5, 2, 3}.qkv(at::kDouble)});
}

// Logits to about +-60,000: softmax picks one key, so that the gradients of q and k vanish in theory; what
// remains is rounding, which in low precision is as large as the other numbers.
TEST(PackedAttention, ExtremeLogitsDoNotOverflow) {
  const AttentionCase c{1, 70, 2, 64};
  expect_reference(c, at::kFloat, 1e-3, 100, 0.05);
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const at::Tensor qkv = leaf(c.qkv(dtype, 100));
    const at::Tensor out = packed_attention(qkv, c.scale());
    expect_close(out, reference::packed_attention(qkv.to(at::kDouble), c.scale()), kAllowedBf16);
    const at::Tensor grad = torch::autograd::grad({out}, {qkv}, {c.direction(dtype)})[0];
    EXPECT_TRUE(at::isfinite(grad).all().item<bool>());
  }
}

// A bad weight must show in the loss: nothing is clamped away.
TEST(PackedAttention, NanReachesTheOutputAndTheGradient) {
  const AttentionCase c{1, 40, 1, 64};
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (int64_t part = 0; part < 3; ++part) {
      at::Tensor qkv = c.qkv(dtype);
      qkv[0][7][part][0][3] = NAN;
      qkv.requires_grad_();
      const at::Tensor out = packed_attention(qkv, c.scale());
      EXPECT_TRUE(at::isnan(out[0][7]).any().item<bool>());
      const at::Tensor grad = torch::autograd::grad({out}, {qkv}, {c.direction(dtype)})[0];
      EXPECT_TRUE(at::isnan(grad).any().item<bool>());
    }
  }
}

TEST(PackedAttention, NegativeAndZeroScale) {
  for (const double scale : {-0.3, 0.0}) {
    const at::Tensor qkv = AttentionCase{1, 50, 2, 16}.qkv(at::kFloat);
    expect_close(packed_attention(qkv, scale), reference::packed_attention(qkv.to(at::kDouble), scale),
                 kAllowedF32);
  }
}

TEST(PackedAttention, SameBitsAgainAndWithAnyThreads) {
  for (const auto dtype : {at::kFloat, at::kBFloat16})
    for (const AttentionCase& c : {AttentionCase{1, 200, 1, 64}, AttentionCase{3, 50, 2, 72}})
      expect_thread_count_does_not_matter(
          [&](const Tensors& in) { return packed_attention(in[0], c.scale()); }, {c.qkv(dtype)});
}

TEST(PackedAttention, MetaAgrees) {
  const AttentionCase c{2, 24, 3, 16};
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble})
    expect_meta_agrees([&](const Tensors& in) { return packed_attention(in[0], c.scale()); }, {c.qkv(dtype)});
}

TEST(PackedAttention, EmptyBatch) {
  const at::Tensor out = packed_attention(at::empty({0, 8, 3, 2, 16}), 0.25);
  EXPECT_EQ(out.sizes(), (std::vector<int64_t>{0, 8, 32}));
}

TEST(PackedAttention, NamesAWrongShape) {
  EXPECT_EQ(message_of([] {
              packed_attention(at::zeros({2, 8, 2, 4, 16}), 0.25);
            }),
            "[packed_attention] expected floating qkv (B, N, 3, H, d), got Float 2x8x2x4x16");
}

// What machines without AVX-512 run: ATen's flash attention, f32 for low precision.
TEST(PackedAttention, MatchesTheReferenceWithoutAvx512) {
  hwy::GetChosenTarget().Update(HWY_AVX2);
  for (const int64_t head_dim : {7, 64, 72}) expect_reference_in_every_dtype({2, 33, 2, head_dim});
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

// Whatever ATen would choose on a GPU is an engine of its own, or none: flash attention is not what is left
// over.
TEST(PackedAttention, TakesTheEngineThatAtenNames) {
  const auto engine = [](at::SDPBackend backend) {
    return cuda::engine_of_backend(static_cast<int64_t>(backend));
  };
  EXPECT_EQ(engine(at::SDPBackend::flash_attention), AttentionEngine::kFlash);
  EXPECT_EQ(engine(at::SDPBackend::cudnn_attention), AttentionEngine::kCudnn);
  EXPECT_EQ(engine(at::SDPBackend::efficient_attention), AttentionEngine::kMemoryEfficient);
  for (const auto backend : {at::SDPBackend::math, at::SDPBackend::error, at::SDPBackend::overrideable})
    EXPECT_EQ(engine(backend), AttentionEngine::kNone);
}

// ATen's kernel takes a block of scores for every thread, beside its result.
TEST(FusedAttention, ADryRunAllocatesWhatTheCpuDoes) {
  install_tracking_cpu_allocator();
  const auto attend = [](at::Device device, at::ScalarType dtype, int64_t num_queries, int64_t num_keys) {
    const auto options = at::TensorOptions(device).dtype(dtype);
    const at::Tensor keys = at::zeros({2, 3, num_keys, 24}, options);
    fused_attention(at::zeros({2, 3, num_queries, 24}, options), keys, keys);
  };
  const DryRunScope dry_run(DryRunDevice::kCpu);
  for (const at::ScalarType dtype : {kF32, kBf16}) {
    // There ATen may pack bf16 keys for oneDNN, whatever KILN_CPU says.
    if (dtype == kBf16 && __builtin_cpu_supports("avx512f")) continue;
    for (const auto& [num_queries, num_keys] : {std::pair{20, 77}, {200, 77}, {800, 600}}) {
      MetaMeter planned;
      {
        const MetaAllocationScope scope(planned);
        attend(at::kMeta, dtype, num_queries, num_keys);
      }
      const int64_t before = live_cpu_bytes().live;
      reset_peak_cpu_bytes();
      attend(at::kCPU, dtype, num_queries, num_keys);
      EXPECT_EQ(live_cpu_bytes().peak - before, planned.peak)
          << c10::toString(dtype) << ", " << num_queries << " queries of " << num_keys;
    }
  }
}

// A mask for each head, of which each sample has the same, and a token that may see none.
TEST(FusedAttention, AddsAMaskWhereNoGradientIsWanted) {
  const at::Tensor q = randn({2, 50, 3, 24}, kF32, 1), kv = randn({2, 90, 2, 3, 24}, kF32, 2);
  at::Tensor mask = randn({1, 3, 50, 90}, kF32, 3);
  mask.narrow(3, 60, 30).fill_(std::numeric_limits<float>::lowest());
  mask[0][1][7].fill_(std::numeric_limits<float>::lowest());
  const auto attend = [&](at::ScalarType dtype) {
    const auto heads = [&](const at::Tensor& tokens) { return tokens.to(dtype).transpose(1, 2); };
    return std::array{heads(q), heads(kv.select(2, 0)), heads(kv.select(2, 1))};
  };
  const auto [q64, k64, v64] = attend(at::kDouble);
  const at::Tensor weights =
      at::softmax(at::matmul(q64, k64.transpose(2, 3)) * 0.3 + mask.to(at::kDouble), -1);
  const at::NoGradGuard no_grad;
  for (const at::ScalarType dtype : {kF32, kBf16}) {
    const auto [q_of, k_of, v_of] = attend(dtype);
    const at::Tensor out = fused_attention(q_of, k_of, v_of, mask.expand({2, 3, 50, 90}), 0.3);
    EXPECT_EQ(out.sizes(), q_of.sizes());
    expect_close(out, at::matmul(weights, v64), 4 * tolerance_of(dtype));
  }
}

}  // namespace
}  // namespace kiln::ops
