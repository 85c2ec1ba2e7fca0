// Attention on a CPU over the heads of all samples, head by head. Not differentiable.
#pragma once
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>

namespace kiln::ops::cpu {

// What is attended to. All tensors have unit stride last, and the dtype that computing_dtype() returned.
struct AttentionHeads {
  at::Tensor q;  // (B, N, H, d)
  at::Tensor k,
      v;  // (B, M, H, d); with offsets (T, H, d), and sample b has rows [offsets[b], offsets[b + 1])
  at::IntArrayRef offsets;  // (B + 1), or empty
  double scale;
  at::Tensor mask = {};  // f32 (B, H, N, M) with unit stride last, added to scaled scores; forward only

  int64_t first_key(int64_t sample) const { return offsets.empty() ? 0 : offsets[sample]; }
  int64_t num_keys(int64_t sample) const {
    return offsets.empty() ? k.size(1) : offsets[sample + 1] - offsets[sample];
  }
  // Without rounding: what kernels are chosen by.
  int64_t mean_keys() const {
    return offsets.empty() ? k.size(1) : (offsets.back() - offsets.front()) / std::max<int64_t>(q.size(0), 1);
  }
};

// Returns the dtype in which heads like these are computed. fp16 is storage only, and so is bf16 without bf16
// instructions.
at::ScalarType computing_dtype(const AttentionHeads& heads);
// True if kernels that add a mask compute these.
bool serves_mask(const AttentionHeads& heads);

// Fills in out (B, N, H, d), contiguous, with zeros for samples without keys, and log2_sum (B, H, N) f32.
void attend(const AttentionHeads& heads, const at::Tensor& out, const at::Tensor& log2_sum);

// The gradients of q, k and v, unit stride last. With `pieces` above one, k and v are (pieces, T, H, d) in
// f32, sums over the queries of each piece.
struct HeadGrads {
  at::Tensor q, k, v;
  int64_t pieces = 1;
};
// Returns how many pieces leave no core idle. Depends on the shapes alone, so sums over queries do not depend
// on the number of threads.
int64_t pieces_of_queries(const at::Tensor& q);

// `out` and `log2_sum` are of attend(), `grad_out` is like out. Rows that belong to no sample are left as
// they are.
void attend_backward(const AttentionHeads& heads, const at::Tensor& out, const at::Tensor& log2_sum,
                     const at::Tensor& grad_out, const HeadGrads& grads);

}  // namespace kiln::ops::cpu
