// Linear attention with ReLU features. With M = sum_n k_n v_n^T and z = sum_n k_n (k, q after ReLU):
// out_n = M^T q_n / (z . q_n + eps). All passes are two patterns on small blocks of tokens, which are first
// widened to f32: adding outer products to a (d, d) matrix, and multiplying by it.
#include "ops/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/linear_attention.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <vector>

#include "ops/cpu/kernels.h"
#include "ops/cpu/simd-inl.h"
#include "ops/cpu/streams-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kiln::ops::cpu {
namespace HWY_NAMESPACE {

constexpr size_t kTokens = kLanes >= 16 ? 8 : 4;  // tokens of a block; their vectors stay in registers
constexpr float kEps = 1e-15f;
// How far ahead tokens are prefetched.
constexpr size_t kTokensAhead = 16;

// Rows of f32, padded with zeros to whole vectors.
struct Matrix {
  std::vector<float> values;
  size_t stride;
  Matrix(size_t rows, size_t width)
      : values(rows * ((width + kLanes - 1) / kLanes * kLanes)), stride(values.size() / rows) {}
  float* row(size_t i) { return values.data() + i * stride; }
  const float* row(size_t i) const { return values.data() + i * stride; }
};

// Writes tokens [first, first + kTokens) as f32, with zeros after the last token.
template <class T>
HWY_INLINE void widen(const HeadTokens& tokens, const LinearAttentionShape& shape, size_t first, bool relu,
                      Matrix& to) {
  for (size_t t = 0; t < kTokens; ++t) {
    if (first + t >= shape.num_tokens) {
      std::fill_n(to.row(t), to.stride, 0.0f);
      continue;
    }
    const T* from = static_cast<const T*>(tokens.data) + (first + t) * tokens.stride;
    if (first + t + kTokensAhead < shape.num_tokens)
      fetch_piece(from + kTokensAhead * tokens.stride, shape.head_dim);
    float* row = to.row(t);
    for_each_vector(shape.head_dim, [=](size_t j, size_t count) HWY_ATTR {
      const Vec x = load(from + j, count);
      store(relu ? hn::Max(set(0), x) : x, row + j);  // in this order NaN stays NaN
    });
  }
}

// sums[c] += sum_t rows[t][c] * factors[t]; null factors stand for 1.
HWY_INLINE void add_rows(const Matrix& rows, const float* factors, float* sums) {
  for (size_t j = 0; j < rows.stride; j += kLanes) {
    Vec sum = load(sums + j);
    for (size_t t = 0; t < kTokens; ++t)
      sum = factors ? hn::MulAdd(load(rows.row(t) + j), set(factors[t]), sum)
                    : hn::Add(load(rows.row(t) + j), sum);
    store(sum, sums + j);
  }
}

// matrix[c] += sum_t left[t][c] * right[t], for c < width
HWY_INLINE void add_outer_products(const Matrix& left, const Matrix& right, size_t width, Matrix& matrix) {
  for (size_t j = 0; j < right.stride; j += kLanes) {
    Vec columns[kTokens];
    for (size_t t = 0; t < kTokens; ++t) columns[t] = load(right.row(t) + j);
    for (size_t c = 0; c < width; ++c) {
      Vec even = load(matrix.row(c) + j), odd = set(0);
      for (size_t t = 0; t < kTokens; t += 2) {
        even = hn::MulAdd(set(left.row(t)[c]), columns[t], even);
        odd = hn::MulAdd(set(left.row(t + 1)[c]), columns[t + 1], odd);
      }
      store(hn::Add(even, odd), matrix.row(c) + j);
    }
  }
}

// kVectors vectors, from column j, of multiply(): enough sums at once that no product waits for the one
// before.
template <size_t kVectors>
HWY_INLINE void multiply_vectors(const Matrix& from, const Matrix& matrix, const Matrix* offsets,
                                 size_t width, size_t j, Matrix& to) {
  Vec sums[kTokens][kVectors];
  for (auto& of_token : sums)
    for (Vec& sum : of_token) sum = set(0);
  for (size_t c = 0; c < width; ++c) {
    Vec row[kVectors];
    for (size_t i = 0; i < kVectors; ++i) row[i] = load(matrix.row(c) + j + i * kLanes);
    for (size_t t = 0; t < kTokens; ++t) {
      const Vec factor = set(from.row(t)[c]);
      for (size_t i = 0; i < kVectors; ++i)
        sums[t][i] =
            hn::MulAdd(factor, offsets ? hn::Sub(row[i], set(offsets->row(t)[c])) : row[i], sums[t][i]);
    }
  }
  for (size_t t = 0; t < kTokens; ++t)
    for (size_t i = 0; i < kVectors; ++i) store(sums[t][i], to.row(t) + j + i * kLanes);
}

// to[t] = sum over c < width of from[t][c] * (matrix[c] - offsets[t][c]); null offsets stand for 0.
HWY_INLINE void multiply(const Matrix& from, const Matrix& matrix, const Matrix* offsets, size_t width,
                         Matrix& to) {
  size_t j = 0;
  for (; j + 2 * kLanes <= matrix.stride; j += 2 * kLanes)
    multiply_vectors<2>(from, matrix, offsets, width, j, to);
  if (j < matrix.stride) multiply_vectors<1>(from, matrix, offsets, width, j, to);
}

HWY_INLINE float dot(const float* a, const float* b, size_t padded) {
  Vec sum = set(0);
  for (size_t j = 0; j < padded; j += kLanes) sum = hn::MulAdd(load(a + j), load(b + j), sum);
  return sum_lanes(sum);
}

template <class T>
HWY_INLINE void write(const Matrix& from, const LinearAttentionShape& shape, size_t first,
                      const HeadTokens& to) {
  for (size_t t = 0; t < kTokens && first + t < shape.num_tokens; ++t) {
    T* row = static_cast<T*>(to.data) + (first + t) * to.stride;
    const float* values = from.row(t);
    for_each_vector(shape.head_dim,
                    [=](size_t j, size_t count) HWY_ATTR { store(load(values + j), row + j, count); });
  }
}

// The gradient of a ReLU: zero where its input was not positive.
HWY_INLINE void mask(const Matrix& activations, Matrix& grads) {
  for (size_t t = 0; t < kTokens; ++t)
    for (size_t j = 0; j < grads.stride; j += kLanes)
      store(hn::IfThenElseZero(hn::Gt(load(activations.row(t) + j), set(0)), load(grads.row(t) + j)),
            grads.row(t) + j);
}

Matrix transposed(const Matrix& matrix, size_t width) {
  Matrix result(width, width);
  for (size_t i = 0; i < width; ++i)
    for (size_t j = 0; j < width; ++j) result.row(i)[j] = matrix.row(j)[i];
  return result;
}

// M and z of this file's first comment.
struct KeySums {
  Matrix products;
  std::vector<float> keys;
};

template <class T>
KeySums key_sums(const LinearAttentionShape& shape, const HeadTokens& k, const HeadTokens& v) {
  const size_t d = shape.head_dim;
  Matrix keys(kTokens, d), values(kTokens, d);
  KeySums sums{Matrix(d, d), std::vector<float>(keys.stride)};
  for (size_t n = 0; n < shape.num_tokens; n += kTokens) {
    widen<T>(k, shape, n, true, keys);
    widen<T>(v, shape, n, false, values);
    add_outer_products(keys, values, d, sums.products);
    add_rows(keys, nullptr, sums.keys.data());
  }
  return sums;
}

template <class T>
void forward_head(const LinearAttentionShape& shape, const HeadTokens& q, const HeadTokens& k,
                  const HeadTokens& v, const HeadTokens& out) {
  const size_t d = shape.head_dim;
  const KeySums sums = key_sums<T>(shape, k, v);
  Matrix queries(kTokens, d), result(kTokens, d);
  for (size_t n = 0; n < shape.num_tokens; n += kTokens) {
    widen<T>(q, shape, n, true, queries);
    multiply(queries, sums.products, nullptr, d, result);
    for (size_t t = 0; t < kTokens; ++t) {
      const Vec factor = set(1 / (dot(queries.row(t), sums.keys.data(), queries.stride) + kEps));
      float* row = result.row(t);
      for (size_t j = 0; j < result.stride; j += kLanes) store(hn::Mul(load(row + j), factor), row + j);
    }
    write<T>(result, shape, n, out);
  }
}

// Divides row c of M by z_c: the mean value under feature c alone. Without keys the row stays as it is, 0 or
// NaN.
void make_means(const std::vector<float>& keys, size_t width, Matrix& products) {
  for (size_t c = 0; c < width; ++c)
    if (keys[c] > 0)
      for (size_t j = 0; j < products.stride; ++j) products.row(c)[j] /= keys[c];
}

// With u_n = g_n / den_n and w_n = -u_n . out_n:  dq_n = z (m u_n + w_n) for the means m = M / z,
// dM = sum q_n u_n^T,  dz = sum w_n q_n,  dv_n = dM^T k_n,  dk_n = dM v_n + dz. dq_n is a sum over
// differences of m and out_n, which is a mean of m: where a token has one feature, or all means are one, they
// are 0 and stay 0, as M u_n + w_n z would not.
template <class T>
void backward_head(const LinearAttentionShape& shape, const HeadTokens& q, const HeadTokens& k,
                   const HeadTokens& v, const HeadTokens& grad, const HeadTokens& grad_q,
                   const HeadTokens& grad_k, const HeadTokens& grad_v) {
  const size_t d = shape.head_dim;
  KeySums sums = key_sums<T>(shape, k, v);
  make_means(sums.keys, d, sums.products);
  const Matrix means_t = transposed(sums.products, d);
  Matrix a(kTokens, d), b(kTokens, d), shares(kTokens, d), out(kTokens, d), result(kTokens, d),
      grad_products(d, d);
  std::vector<float> grad_keys(a.stride);
  for (size_t n = 0; n < shape.num_tokens; n += kTokens) {
    widen<T>(q, shape, n, true, a);
    widen<T>(grad, shape, n, false, b);
    for (size_t t = 0; t < kTokens; ++t) {
      const Vec denominator = set(dot(a.row(t), sums.keys.data(), a.stride) + kEps);
      for (size_t j = 0; j < b.stride; j += kLanes) {
        const Vec share = hn::Mul(load(a.row(t) + j), load(sums.keys.data() + j));
        store(hn::Div(share, denominator), shares.row(t) + j);
        store(hn::Div(load(b.row(t) + j), denominator), b.row(t) + j);
      }
    }
    multiply(shares, sums.products, nullptr, d, out);
    float weights[kTokens];
    for (size_t t = 0; t < kTokens; ++t) weights[t] = -dot(b.row(t), out.row(t), b.stride);
    add_outer_products(a, b, d, grad_products);
    add_rows(a, weights, grad_keys.data());
    multiply(b, means_t, &out, d, result);
    for (size_t t = 0; t < kTokens; ++t)
      for (size_t j = 0; j < result.stride; j += kLanes)
        store(hn::Mul(load(sums.keys.data() + j), load(result.row(t) + j)), result.row(t) + j);
    mask(a, result);
    write<T>(result, shape, n, grad_q);
  }
  const Matrix grad_products_t = transposed(grad_products, d);
  for (size_t n = 0; n < shape.num_tokens; n += kTokens) {
    widen<T>(k, shape, n, true, a);
    widen<T>(v, shape, n, false, b);
    multiply(a, grad_products, nullptr, d, result);
    write<T>(result, shape, n, grad_v);
    multiply(b, grad_products_t, nullptr, d, result);
    for (size_t t = 0; t < kTokens; ++t)
      for (size_t j = 0; j < result.stride; j += kLanes)
        store(hn::Add(load(grad_keys.data() + j), load(result.row(t) + j)), result.row(t) + j);
    mask(a, result);
    write<T>(result, shape, n, grad_k);
  }
}

void linear_attention_forward(const LinearAttentionShape& shape, const HeadTokens& q, const HeadTokens& k,
                              const HeadTokens& v, const HeadTokens& out) {
  with_element(shape.dtype,
               [&](auto element) HWY_ATTR { forward_head<decltype(element)>(shape, q, k, v, out); });
}

void linear_attention_backward(const LinearAttentionShape& shape, const HeadTokens& q, const HeadTokens& k,
                               const HeadTokens& v, const HeadTokens& grad, const HeadTokens& grad_q,
                               const HeadTokens& grad_k, const HeadTokens& grad_v) {
  with_element(shape.dtype, [&](auto element) HWY_ATTR {
    backward_head<decltype(element)>(shape, q, k, v, grad, grad_q, grad_k, grad_v);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace kiln::ops::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kiln::ops::cpu {

HWY_EXPORT(linear_attention_forward);
HWY_EXPORT(linear_attention_backward);

void linear_attention(const LinearAttentionShape& shape, HeadTokens q, HeadTokens k, HeadTokens v,
                      HeadTokens out) {
  HWY_DYNAMIC_DISPATCH(linear_attention_forward)(shape, q, k, v, out);
}

void linear_attention_grad(const LinearAttentionShape& shape, HeadTokens q, HeadTokens k, HeadTokens v,
                           HeadTokens grad, HeadTokens grad_q, HeadTokens grad_k, HeadTokens grad_v) {
  HWY_DYNAMIC_DISPATCH(linear_attention_backward)(shape, q, k, v, grad, grad_q, grad_k, grad_v);
}

}  // namespace kiln::ops::cpu
#endif
