// Gradients of q, k and v in packed memory, as far as a CPU goes: the memory-efficient kernels behind an
// emulation (fused_attention.cpp), and cuDNN's own library without a GPU, which checks a graph but runs none.
#include <cmath>

#include "core/dry_run.h"
#include "ops/attention.h"
#include "ops/checks.h"
#include "ops/cuda/attention_graph.h"
#include "ops/op_recorder.h"

namespace kiln::ops {
namespace {

TEST(PackedAttentionGrads, AreWrittenByTheMemoryEfficientKernels) {
  const double scale = 0.3;
  const at::Tensor qkv = randn({2, 9, 3, 2, 8}, kF32, 1), grad = randn({2, 9, 16}, kF32, 2);
  const auto composed = [&](const Tensors& in) { return reference::packed_attention(in[0], scale); };
  const at::Tensor scores =
      at::matmul(attention_heads(qkv, 0), attention_heads(qkv, 1).transpose(2, 3)) * scale;
  const AttentionResult result{composed({qkv}).contiguous(), scores.logsumexp(-1), at::empty({}, at::kLong),
                               at::empty({}, at::kLong)};
  const AttentionGrads got = cuda::attention_backward(
      grad, qkv, result, {.scale = scale, .engine = AttentionEngine::kMemoryEfficient, .packs = true});
  ASSERT_TRUE(got.packed.defined());
  EXPECT_TRUE(got.packed.is_contiguous());
  expect_close(got.packed, gradients(composed, {qkv}, grad)[0], 1e-5);
}

// A plan has the packing as an operation of its own, where the kernels leave it to be done.
TEST(PackedAttentionGrads, APlanHasOneOperationLess) {
  const DryRunScope dry_run(DryRunDevice::kCuda);
  const auto packs = [](bool pack_gradients) {
    const OpChoicesScope choices({.pack_gradients = pack_gradients});
    const at::Tensor qkv =
        at::empty({2, 9, 3, 2, 8}, at::TensorOptions(at::kMeta).dtype(kBf16)).requires_grad_();
    const at::Tensor out = packed_attention(qkv, 1);
    OpRecorder recorder(/*timed=*/false);
    const at::Tensor grad = torch::autograd::grad({out}, {qkv}, {at::empty_like(out)})[0];
    EXPECT_EQ(grad.sizes(), qkv.sizes());
    int64_t found = 0;
    for (const OpRecord& op : recorder.take()) found += op.name == "kiln::pack_heads";
    return found;
  };
  EXPECT_EQ(packs(false), 1);
  EXPECT_EQ(packs(true), 0);
}

// cuDNN refuses tensors and operations that do not fit together.
TEST(PackedAttentionGrads, CudnnAcceptsTheirGraph) {
  for (const Dtype dtype : {Dtype::kBF16, Dtype::kF16}) {
    AttentionGradsArgs args{};
    args.dtype = dtype;
    args.batch = 2;
    args.num_tokens = 77;
    args.num_heads = 3;
    args.head_dim = 72;
    cuda::AttentionGraph graph(args);
    graph.descriptors().finish(graph.operations());
    EXPECT_EQ(graph.descriptors().status(), CUDNN_STATUS_SUCCESS);
  }
}

}  // namespace
}  // namespace kiln::ops
