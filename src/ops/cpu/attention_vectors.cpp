// Attention of one head on processors without AVX-512, or to few keys. A block of queries meets a block of
// keys, both as f32 in the caches. Scores lie transposed, (keys, queries), so a vector holds neighbouring
// queries, and softmax needs no sum across lanes. Its maximum and sum follow the blocks of keys (Dao et al.
// 2022, algorithm 1).
#include "ops/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/attention_vectors.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <hwy/contrib/math/math-inl.h>

#include <algorithm>

#include "ops/cpu/attention_kernel.h"
#include "ops/cpu/sigmoid-inl.h"
#include "ops/cpu/small_products-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kiln::ops::cpu {
namespace HWY_NAMESPACE {

// Queries and keys of a block: whole tiles of products and whole vectors. Their scores stay in the
// second-level cache.
constexpr size_t kQueries = kVectorQueries, kKeys = kVectorKeys;

HeadTokens tokens_of(const void* data, int64_t stride) {
  return {const_cast<void*>(data), static_cast<size_t>(stride)};
}
RowMajor rows_from(RowMajor rows, size_t first) { return {rows.values + first * rows.stride, rows.stride}; }
LeftMatrix as_left(RowMajor rows) { return {rows.values, rows.stride, 1}; }
LeftMatrix transposed(RowMajor rows) { return {rows.values, 1, rows.stride}; }

// Holds for each query of a block its largest score, the sum of exp2 of its scores less that, and what
// earlier sums are multiplied by.
struct Softmax {
  float *top, *sum, *factor;
};

// Replaces kVectors vectors of columns of scores, each of one query, by exp2 of them less their maximum over
// this block and those before, and brings the sums up to date. `is_first`: of no block before.
template <size_t kVectors>
HWY_INLINE void exp2_columns(RowMajor scores, size_t keys, bool is_first, Softmax of) {
  Vec top[kVectors], sum[kVectors];
  HWY_UNROLL(4)
  for (size_t j = 0; j < kVectors; ++j) top[j] = load((is_first ? scores.values : of.top) + j * kLanes);
  for (size_t l = 0; l < keys; ++l) {
    HWY_UNROLL(4)
    for (size_t j = 0; j < kVectors; ++j)
      top[j] = hn::Max(top[j], load(scores.values + l * scores.stride + j * kLanes));
  }
  HWY_UNROLL(4)
  for (size_t j = 0; j < kVectors; ++j) {
    sum[j] = set(0);
    if (!is_first) {
      const Vec factor = exp2_below_127(hn::Sub(load(of.top + j * kLanes), top[j]));
      store(factor, of.factor + j * kLanes);
      sum[j] = hn::Mul(load(of.sum + j * kLanes), factor);
    }
    store(top[j], of.top + j * kLanes);
  }
  for (size_t l = 0; l < keys; ++l) {
    float* row = scores.values + l * scores.stride;
    HWY_UNROLL(4)
    for (size_t j = 0; j < kVectors; ++j) {
      const Vec p = exp2_below_127(hn::Sub(load(row + j * kLanes), top[j]));
      sum[j] = hn::Add(sum[j], p);
      store(p, row + j * kLanes);
    }
  }
  HWY_UNROLL(4)
  for (size_t j = 0; j < kVectors; ++j) store(sum[j], of.sum + j * kLanes);
}

HWY_INLINE void exp2_block(RowMajor scores, size_t keys, size_t vectors, bool is_first, Softmax of) {
  size_t j = 0;
  const auto columns = [&](auto count) HWY_ATTR {
    const size_t at = j * kLanes;
    exp2_columns<decltype(count)::value>({scores.values + at, scores.stride}, keys, is_first,
                                         {of.top + at, of.sum + at, of.factor + at});
    j += count;
  };
  while (j + 2 <= vectors) columns(std::integral_constant<size_t, 2>());
  if (j < vectors) columns(std::integral_constant<size_t, 1>());
}

// Multiplies each row by a factor of its own.
HWY_INLINE void scale_rows(RowMajor rows, size_t count, size_t vectors, const float* factors) {
  for (size_t i = 0; i < count; ++i) {
    float* row = rows.values + i * rows.stride;
    for (size_t j = 0; j < vectors; ++j)
      store(hn::Mul(load(row + j * kLanes), set(factors[i])), row + j * kLanes);
  }
}

template <class T>
void forward_of(const AttentionForward& args, size_t row_begin, size_t row_end, float* scratch) {
  const size_t d = args.head_dim, n = args.num_keys, vectors = row_vectors(d), width = vectors * kLanes;
  Pieces pieces{scratch};
  const RowMajor k = pieces.take(n, width), v = pieces.take(n, width), q_t = pieces.take(width, kQueries),
                 p = pieces.take(kKeys, kQueries), out = pieces.take(kQueries, width);
  const Softmax softmax{pieces.take(1, kQueries).values, pieces.take(1, kQueries).values,
                        pieces.take(1, kQueries).values};
  widen_rows<T>(tokens_of(args.k, args.k_stride), 0, n, n, d, 1, k);
  widen_rows<T>(tokens_of(args.v, args.v_stride), 0, n, n, d, 1, v);
  for (size_t row = row_begin; row < row_end; row += kQueries) {
    const size_t count = std::min(kQueries, row_end - row), lanes = whole_vectors(count);
    widen_rows<T>(tokens_of(args.q, args.q_stride), row, count, lanes * kLanes, d, args.scale * kLog2E, out);
    transpose(out, lanes * kLanes, width, q_t);
    for (size_t key = 0; key < n; key += kKeys) {
      const size_t keys = std::min(kKeys, n - key);
      multiply(as_left(rows_from(k, key)), q_t, p, keys, lanes, d);
      exp2_block(p, keys, lanes, key == 0, softmax);
      if (key > 0) scale_rows(out, count, vectors, softmax.factor);
      multiply(transposed(p), rows_from(v, key), out, count, vectors, keys, key > 0);
    }
    for_each_vector(count, [&](size_t i, size_t used) HWY_ATTR {
      const Vec sum = load(softmax.sum + i);
      store(hn::Add(load(softmax.top + i), hn::Log2(F32(), sum)), args.log2_sum + row + i, used);
      store(hn::Div(set(1.0f), sum), softmax.factor + i);
    });
    scale_rows(out, count, vectors, softmax.factor);
    narrow_rows<T>(out, count, d, 1, tokens_of(args.out, args.out_stride), row);
  }
}

// Replaces scores by p = exp2(scores - log2_sum), and grads by p * (grads - delta).
HWY_INLINE void softmax_grad_block(RowMajor scores, RowMajor grads, size_t keys, size_t vectors,
                                   const float* log2_sum, const float* delta) {
  for (size_t j = 0; j < vectors; ++j) {
    const Vec shift = load(log2_sum + j * kLanes), less = load(delta + j * kLanes);
    for (size_t l = 0; l < keys; ++l) {
      float *score = scores.values + l * scores.stride + j * kLanes,
            *grad = grads.values + l * grads.stride + j * kLanes;
      const Vec p = exp2_below_127(hn::Sub(load(score), shift));
      store(p, score);
      store(hn::Mul(p, hn::Sub(load(grad), less)), grad);
    }
  }
}

template <class T>
void backward_of(const AttentionBackward& args, float* scratch) {
  const size_t d = args.head_dim, n = args.num_keys, vectors = row_vectors(d), width = vectors * kLanes;
  Pieces pieces{scratch};
  const RowMajor k = pieces.take(n, width), v = pieces.take(n, width), grad_k = pieces.take(n, width),
                 grad_v = pieces.take(n, width), q = pieces.take(kQueries, width),
                 grad = pieces.take(kQueries, width), grad_q = pieces.take(kQueries, width),
                 q_t = pieces.take(width, kQueries), grad_t = pieces.take(width, kQueries),
                 p = pieces.take(kKeys, kQueries), ds = pieces.take(kKeys, kQueries);
  float *log2_sum = pieces.take(1, kQueries).values, *delta = pieces.take(1, kQueries).values;
  const HeadTokens out = tokens_of(args.out, args.out_stride);
  widen_rows<T>(tokens_of(args.k, args.k_stride), 0, n, n, d, 1, k);
  widen_rows<T>(tokens_of(args.v, args.v_stride), 0, n, n, d, 1, v);
  const size_t num_queries = args.num_queries;
  for (size_t row = 0; row < num_queries; row += kQueries) {
    const size_t count = std::min(kQueries, num_queries - row), lanes = whole_vectors(count);
    widen_rows<T>(tokens_of(args.q, args.q_stride), row, count, lanes * kLanes, d, args.scale * kLog2E, q);
    widen_rows<T>(tokens_of(args.grad_out, args.out_stride), row, count, lanes * kLanes, d, 1, grad);
    transpose(q, lanes * kLanes, width, q_t);
    transpose(grad, lanes * kLanes, width, grad_t);
    for (size_t i = 0; i < lanes * kLanes; ++i) {
      // The sum of grad_out * out (Dao et al. 2022, eq. 4).
      Vec sum = set(0);
      const T* of = static_cast<const T*>(out.data) + (row + i) * out.stride;
      for (size_t j = 0; i < count && j < d; j += kLanes)
        sum = hn::MulAdd(load(of + j, std::min(kLanes, d - j)), load(grad.values + i * width + j), sum);
      delta[i] = sum_lanes(sum);
      log2_sum[i] = i < count ? args.log2_sum[row + i] : 0;
    }
    for (size_t key = 0; key < n; key += kKeys) {
      const size_t keys = std::min(kKeys, n - key);
      multiply(as_left(rows_from(k, key)), q_t, p, keys, lanes, d);
      multiply(as_left(rows_from(v, key)), grad_t, ds, keys, lanes, d);
      softmax_grad_block(p, ds, keys, lanes, log2_sum, delta);
      multiply(as_left(p), grad, rows_from(grad_v, key), keys, vectors, count, row > 0);
      multiply(as_left(ds), q, rows_from(grad_k, key), keys, vectors, count, row > 0);
      multiply(transposed(ds), rows_from(k, key), grad_q, count, vectors, keys, key > 0);
    }
    narrow_rows<T>(grad_q, count, d, args.scale, tokens_of(args.grad_q, args.grad_q_stride), row);
  }
  const auto store_sums = [&](auto element) HWY_ATTR {
    using Sum = decltype(element);
    // q has the scale.
    narrow_rows<Sum>(grad_k, n, d, 1 / kLog2E, tokens_of(args.grad_k, args.grad_kv_stride), 0);
    narrow_rows<Sum>(grad_v, n, d, 1, tokens_of(args.grad_v, args.grad_kv_stride), 0);
  };
  args.sum_type == AttentionType::kF32 ? store_sums(float()) : store_sums(Bf16());
}

void forward_head(AttentionType type, const AttentionForward& args, int64_t row_begin, int64_t row_end,
                  float* scratch) {
  (type == AttentionType::kF32 ? forward_of<float> : forward_of<Bf16>)(args, row_begin, row_end, scratch);
}

void backward_head(AttentionType type, const AttentionBackward& args, float* scratch) {
  (type == AttentionType::kF32 ? backward_of<float> : backward_of<Bf16>)(args, scratch);
}

}  // namespace HWY_NAMESPACE
}  // namespace kiln::ops::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kiln::ops::cpu {

HWY_EXPORT(forward_head);
HWY_EXPORT(backward_head);

namespace {
constexpr int64_t kBlockScores = kVectorQueries * kVectorKeys;
// Whole vectors of any instruction set.
int64_t padded(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }
}  // namespace

std::size_t vector_forward_scratch(AttentionType, const AttentionSizes& sizes) {
  return sizeof(float) *
         (2 * (sizes.num_keys + kVectorQueries) * padded(sizes.head_dim) + kBlockScores + 3 * kVectorQueries);
}

std::size_t vector_backward_scratch(AttentionType, const AttentionSizes& sizes) {
  return sizeof(float) * ((4 * sizes.num_keys + 5 * kVectorQueries) * padded(sizes.head_dim) +
                          2 * kBlockScores + 2 * kVectorQueries);
}

void vector_forward_head(AttentionType type, const AttentionForward& args, int64_t row_begin, int64_t row_end,
                         void* scratch) {
  HWY_DYNAMIC_DISPATCH(forward_head)(type, args, row_begin, row_end, static_cast<float*>(scratch));
}

void vector_backward_head(AttentionType type, const AttentionBackward& args, void* scratch) {
  HWY_DYNAMIC_DISPATCH(backward_head)(type, args, static_cast<float*>(scratch));
}

}  // namespace kiln::ops::cpu
#endif
