// Attention of one head against a few rows. A block of queries meets all rows at once, with everything in the
// caches as f32. Scores lie transposed, (rows, queries), so a vector holds neighbouring queries. Six rows
// thus keep all lanes as busy as six hundred, and softmax needs no sum across lanes.
#include "ops/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/ragged_attention.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>

#include "ops/cpu/kernels.h"
#include "ops/cpu/sigmoid-inl.h"
#include "ops/cpu/small_products-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kiln::ops::cpu {
namespace HWY_NAMESPACE {

constexpr size_t kQueries = kRaggedQueries;

// Replaces each of the `vectors` vectors of columns by its softmax over the rows.
HWY_INLINE void softmax_columns(RowMajor scores, size_t rows, size_t vectors) {
  for (size_t j = 0; rows > 0 && j < vectors; ++j) {
    float* column = scores.values + j * kLanes;
    Vec top = load(column);
    for (size_t l = 1; l < rows; ++l) top = hn::Max(top, load(column + l * scores.stride));
    const Vec log2_e = set(kLog2E);
    Vec sum = set(0);
    for (size_t l = 0; l < rows; ++l) {
      const Vec p = exp2(hn::Mul(hn::Sub(load(column + l * scores.stride), top), log2_e));
      sum = hn::Add(sum, p);
      store(p, column + l * scores.stride);
    }
    const Vec inverse = hn::Div(set(1), sum);
    for (size_t l = 0; l < rows; ++l)
      store(hn::Mul(load(column + l * scores.stride), inverse), column + l * scores.stride);
  }
}

// Computes the gradient of the scores: dP becomes P * (dP - sum of P * dP over the rows).
HWY_INLINE void softmax_columns_grad(RowMajor probabilities, RowMajor grads, size_t rows, size_t vectors) {
  for (size_t j = 0; j < vectors; ++j) {
    const float* p = probabilities.values + j * kLanes;
    float* dp = grads.values + j * kLanes;
    Vec sum = set(0);
    for (size_t l = 0; l < rows; ++l)
      sum = hn::MulAdd(load(p + l * probabilities.stride), load(dp + l * grads.stride), sum);
    for (size_t l = 0; l < rows; ++l)
      store(hn::Mul(load(p + l * probabilities.stride), hn::Sub(load(dp + l * grads.stride), sum)),
            dp + l * grads.stride);
  }
}

template <class T>
void forward_ragged(const RaggedHead& head, const HeadTokens& out, float* scratch) {
  const size_t d = head.head_dim, num_rows = head.num_rows, vectors = row_vectors(d),
               width = vectors * kLanes;
  Pieces pieces{scratch};
  const RowMajor k = pieces.take(num_rows, width), v = pieces.take(num_rows, width),
                 q = pieces.take(kQueries, width), q_t = pieces.take(width, kQueries),
                 p = pieces.take(num_rows, kQueries);
  widen_rows<T>(head.k, 0, num_rows, num_rows, d, head.scale, k);
  widen_rows<T>(head.v, 0, num_rows, num_rows, d, 1, v);
  for (size_t n = 0; n < head.num_queries; n += kQueries) {
    const size_t count = std::min(kQueries, head.num_queries - n), lanes = whole_vectors(count);
    widen_rows<T>(head.q, n, count, lanes * kLanes, d, 1, q);
    transpose(q, lanes * kLanes, width, q_t);
    multiply({k.values, k.stride, 1}, q_t, p, num_rows, lanes, d);
    softmax_columns(p, num_rows, lanes);
    multiply({p.values, 1, p.stride}, v, q, count, vectors, num_rows);
    narrow_rows<T>(q, count, d, 1, out, n);
  }
}

template <class T>
void backward_ragged(const RaggedHead& head, const HeadTokens& grad, const HeadTokens& grad_q,
                     const HeadTokens& grad_k, const HeadTokens& grad_v, Dtype sum_dtype, float* scratch) {
  const size_t d = head.head_dim, num_rows = head.num_rows, vectors = row_vectors(d),
               width = vectors * kLanes;
  Pieces pieces{scratch};
  const RowMajor k = pieces.take(num_rows, width), v = pieces.take(num_rows, width),
                 dk = pieces.take(num_rows, width), dv = pieces.take(num_rows, width),
                 q = pieces.take(kQueries, width), g = pieces.take(kQueries, width),
                 turned = pieces.take(width, kQueries), p = pieces.take(num_rows, kQueries),
                 ds = pieces.take(num_rows, kQueries);
  widen_rows<T>(head.k, 0, num_rows, num_rows, d, head.scale, k);
  widen_rows<T>(head.v, 0, num_rows, num_rows, d, 1, v);
  for (size_t n = 0; n < head.num_queries; n += kQueries) {
    const size_t count = std::min(kQueries, head.num_queries - n), lanes = whole_vectors(count);
    widen_rows<T>(head.q, n, count, lanes * kLanes, d, 1, q);
    widen_rows<T>(grad, n, count, lanes * kLanes, d, 1, g);
    transpose(q, lanes * kLanes, width, turned);
    multiply({k.values, k.stride, 1}, turned, p, num_rows, lanes, d);
    softmax_columns(p, num_rows, lanes);
    transpose(g, lanes * kLanes, width, turned);
    multiply({v.values, v.stride, 1}, turned, ds, num_rows, lanes, d);
    softmax_columns_grad(p, ds, num_rows, lanes);
    const RowMajor dq{turned.values, width};
    multiply({ds.values, 1, ds.stride}, k, dq, count, vectors, num_rows);
    narrow_rows<T>(dq, count, d, 1, grad_q, n);
    multiply({p.values, p.stride, 1}, g, dv, num_rows, vectors, count, n > 0);
    multiply({ds.values, ds.stride, 1}, q, dk, num_rows, vectors, count, n > 0);
  }
  with_element(sum_dtype, [&](auto element) HWY_ATTR {
    narrow_rows<decltype(element)>(dk, num_rows, d, head.scale, grad_k, 0);
    narrow_rows<decltype(element)>(dv, num_rows, d, 1, grad_v, 0);
  });
}

void ragged_forward(const RaggedHead& head, const HeadTokens& out, float* scratch) {
  with_element(head.dtype,
               [&](auto element) HWY_ATTR { forward_ragged<decltype(element)>(head, out, scratch); });
}

void ragged_backward(const RaggedHead& head, const HeadTokens& grad, const HeadTokens& grad_q,
                     const HeadTokens& grad_k, const HeadTokens& grad_v, Dtype sum_dtype, float* scratch) {
  with_element(head.dtype, [&](auto element) HWY_ATTR {
    backward_ragged<decltype(element)>(head, grad, grad_q, grad_k, grad_v, sum_dtype, scratch);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace kiln::ops::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kiln::ops::cpu {
namespace {

// Rounds a row up to whole vectors of any instruction set.
size_t padded(size_t head_dim) { return (head_dim + 15) / 16 * 16; }

}  // namespace

HWY_EXPORT(ragged_forward);
HWY_EXPORT(ragged_backward);

size_t ragged_attention_scratch(size_t head_dim, size_t num_rows) {
  return 2 * (num_rows + kRaggedQueries) * padded(head_dim) + num_rows * kRaggedQueries;
}

size_t ragged_attention_grad_scratch(size_t head_dim, size_t num_rows) {
  return (4 * num_rows + 3 * kRaggedQueries) * padded(head_dim) + 2 * num_rows * kRaggedQueries;
}

void ragged_attention(const RaggedHead& head, HeadTokens out, float* scratch) {
  HWY_DYNAMIC_DISPATCH(ragged_forward)(head, out, scratch);
}

void ragged_attention_grad(const RaggedHead& head, HeadTokens grad, HeadTokens grad_q, HeadTokens grad_k,
                           HeadTokens grad_v, Dtype sum_dtype, float* scratch) {
  HWY_DYNAMIC_DISPATCH(ragged_backward)(head, grad, grad_q, grad_k, grad_v, sum_dtype, scratch);
}

}  // namespace kiln::ops::cpu
#endif
