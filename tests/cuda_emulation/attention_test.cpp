// Attention through ATen's kernels of CUDA, as far as a CPU goes: emulations stand behind the dispatcher
// (fused_attention.cpp), the way to them and back is the program's own.

#include "core/allocations.h"
#include "ops/caption_attention.h"
#include "ops/checks.h"
#include "ops/cuda/varlen_attention.h"

namespace kiln::ops {
namespace {

using Offsets = std::vector<int64_t>;
constexpr double kScale = 0.3;

struct VarlenCase {
  int64_t num_tokens, num_heads, head_dim, num_rows;
  Offsets offsets;
  at::ScalarType dtype;
  AttentionEngine engine;
};

class Varlen : public ::testing::TestWithParam<VarlenCase> {
 protected:
  // Keys and values lie in one projection, as in a model.
  static Tensors inputs() {
    const VarlenCase& c = GetParam();
    const int64_t batch = static_cast<int64_t>(c.offsets.size()) - 1;
    return {randn({batch, c.num_tokens, c.num_heads, c.head_dim}, c.dtype, 1),
            randn({c.num_rows, 2, c.num_heads, c.head_dim}, c.dtype, 2)};
  }
  static Function fused(const at::Tensor& device_offsets = {}) {
    return [device_offsets](const Tensors& in) {
      return varlen_attention(in[0], in[1].select(1, 0), in[1].select(1, 1), GetParam().offsets,
                              device_offsets, kScale, GetParam().engine);
    };
  }
  static at::Tensor sample_by_sample(const Tensors& in) {
    return reference::ragged_attention(in[0], in[1].select(1, 0), in[1].select(1, 1), GetParam().offsets,
                                       kScale);
  }
};

TEST_P(Varlen, IsTheLoopOverSamples) {
  EXPECT_EQ(fused()(inputs()).scalar_type(), GetParam().dtype);
  expect_equals_reference(fused(), sample_by_sample, inputs(), {.gradients = 4});
}

TEST_P(Varlen, TakesOffsetsThatTheDeviceHas) {
  const Tensors in = inputs();
  const at::Tensor offsets = at::tensor(GetParam().offsets, at::kInt);
  EXPECT_TRUE(bitwise_equal(fused(offsets)(in), fused()(in)));
}

TEST_P(Varlen, ADryRunOfCudaAgrees) {
  const DryRunScope dry_run(DryRunDevice::kCuda);
  expect_meta_agrees(
      [](const Tensors& in) {
        return in[0].is_meta() ? ragged_attention(in[0], in[1].select(1, 0), in[1].select(1, 1),
                                                  GetParam().offsets, kScale)
                               : fused()(in);
      },
      inputs());
}

constexpr auto kFlash = AttentionEngine::kFlash, kEfficient = AttentionEngine::kMemoryEfficient;
INSTANTIATE_TEST_SUITE_P(
    Shapes, Varlen,
    ::testing::Values(VarlenCase{33, 3, 8, 12, {0, 5, 5, 12}, kBf16, kFlash},  // one without rows
                      VarlenCase{70, 2, 72, 90, {0, 40, 77}, kFp16, kFlash},   // rows of no sample
                      VarlenCase{16, 4, 16, 9, {2, 2, 4, 9, 9}, kBf16, kFlash},
                      VarlenCase{33, 3, 12, 12, {0, 5, 5, 12}, kF32, kEfficient},
                      VarlenCase{40, 2, 72, 90, {3, 40, 77}, kF32, kEfficient},
                      VarlenCase{1, 1, 4, 7, {0, 7}, kF32, kEfficient}));

TEST(VarlenAttention, TakesTheKernelThatTheGpuHas) {
  using enum AttentionEngine;
  EXPECT_EQ(varlen_engine(kBf16, 72, 90), kFlash);
  EXPECT_EQ(varlen_engine(kFp16, 192, 80), kFlash);
  EXPECT_EQ(varlen_engine(kFp16, 256, 80), kMemoryEfficient);
  EXPECT_EQ(varlen_engine(kF32, 72, 90), kMemoryEfficient);
  EXPECT_EQ(varlen_engine(kFp16, 72, 75), kMemoryEfficient);
  EXPECT_EQ(varlen_engine(kBf16, 72, 75), kNone);  // Turing has no bf16
  EXPECT_EQ(varlen_engine(kBf16, 36, 90), kNone);
  EXPECT_EQ(varlen_engine(kF32, 6, 90), kNone);
  EXPECT_EQ(varlen_engine(at::kDouble, 64, 90), kNone);
}

// Equal rows for all: the offsets come from the device.
TEST(VarlenAttention, EvenOffsets) {
  const at::Tensor offsets = even_offsets(3, 5, at::kCPU);
  EXPECT_TRUE(at::equal(offsets, at::tensor({0, 5, 10, 15}, at::kInt)));
}

class Sizes : public AllocationObserver {
 public:
  void allocated(uint64_t, size_t bytes) override { taken.push_back(bytes); }
  void freed(uint64_t, size_t) override {}
  std::vector<size_t> taken;
};

// What torch's sources allocate: mha_varlen_bwd's softmax_d and dq_accum; in f32 the product of out and its
// gradient, its sum twice, and the tiles of 128 x 64 with their locks.
TEST(VarlenAttention, ADryRunTakesTheKernelsScratch) {
  const auto taken = [](at::ScalarType dtype) {
    const auto options = at::TensorOptions(at::kMeta).dtype(dtype);
    const at::Tensor q = at::empty({2, 10, 3, 72}, options).requires_grad_(),
                     rows = at::empty({9, 3, 72}, options);
    const at::Tensor offsets = at::empty({3}, options.dtype(at::kInt));
    const DryRunScope dry_run(DryRunDevice::kCuda);
    const at::Tensor out = caption_attention(q, rows, rows, {0, 4, 9}, offsets, kScale);
    const at::Tensor grad = at::empty_like(out);
    Sizes sizes;
    const MetaAllocationScope scope(sizes);
    torch::autograd::grad({out}, {q}, {grad});
    return sizes.taken;
  };
  const size_t q = 2 * 10 * 3 * 72, rows = 9 * 3 * 72, padded = 2 * 10 + 128 * 2;
  EXPECT_THAT(taken(kBf16), ::testing::IsSupersetOf(std::vector<size_t>{
                                2 * q, 2 * rows, 2 * rows, 4 * 3 * padded, 4 * 3 * padded * 96}));
  EXPECT_THAT(taken(kF32),
              ::testing::IsSupersetOf(std::vector<size_t>{4 * q, 4 * rows, 4 * rows, 4 * q, 4 * 60, 4 * 60,
                                                          2 * 3 * 2 * (128 * 64 * 4 + 16)}));
}

}  // namespace
}  // namespace kiln::ops
