// CAME's passes. The sum over a row stays in a register until the row ends. Sums over columns lie in memory
// that the first-level cache holds. Sums of squares continue in f64 after some thousand elements.
#include "ops/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/came.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>

#include "ops/cpu/came.h"
#include "ops/cpu/simd-inl.h"
#include "ops/cpu/streams-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kiln::ops::cpu {
namespace HWY_NAMESPACE {

constexpr size_t kSummedInF32 = 4096;  // elements

// These need no copy for partial vectors: the rows of a convolution's 3 x 3 matrices are all partial.
// Overload resolution prefers them to the templates for elements of any type.
HWY_INLINE Vec load(const float* p, size_t count) {
  return HWY_LIKELY(count == kLanes) ? load(p) : hn::MaskedLoad(hn::FirstN(F32(), count), F32(), p);
}
HWY_INLINE void store(Vec v, float* p, size_t count) {
  if (HWY_LIKELY(count == kLanes))
    store(v, p);
  else
    hn::BlendedStore(v, hn::FirstN(F32(), count), F32(), p);
}

// Returns v with zeros in the lanes from `count` on.
HWY_INLINE Vec first(Vec v, size_t count) {
  return count == kLanes ? v : hn::IfThenElseZero(hn::FirstN(F32(), count), v);
}

// Keeps the factors in registers. As floats in memory, the stores might alias them.
struct Average {
  explicit HWY_INLINE Average(CameAverage average) : beta(set(average.beta)), share(set(average.share)) {}
  HWY_INLINE Vec moved(Vec average, Vec value) const {
    return hn::MulAdd(value, share, hn::Mul(average, beta));
  }
  Vec beta, share;
};

// Does not multiply by 1 - decay, which f32 rounds.
HWY_INLINE Vec decayed(Vec weights, Vec decay) { return hn::NegMulAdd(weights, decay, weights); }

// Calls body(gradients) with the gradients' own type.
template <class Body>
HWY_INLINE void with_gradients(const CameGradients& grads, const Body& body) {
  with_element(grads.dtype,
               [&](auto element) HWY_ATTR { body(static_cast<const decltype(element)*>(grads.values)); });
}

// Adds `x`, a vector of columns, to their sums and to their row's sum.
HWY_INLINE void add_to_sums(Vec x, float* columns, Vec& row, size_t count) {
  row = hn::Add(row, first(x, count));
  store(hn::Add(load(columns, count), x), columns, count);
}

void add_squares(const CameRows& part, float eps_value) {
  const Vec scale = set(part.grads.scale), eps = set(eps_value);
  with_gradients(part.grads, [&](auto* grads) HWY_ATTR {
    for (size_t r = 0; r < part.rows; ++r) {
      auto* row = grads + r * part.columns;
      Vec sum = set(0);
      for_each_vector(part.columns, [&](size_t c, size_t count) HWY_ATTR {
        fetch_ahead(row + c);
        const Vec g = hn::Mul(load(row + c, count), scale);
        add_to_sums(hn::MulAdd(g, g, eps), part.column_sums + c, sum, count);
      });
      part.row_sums[r] += sum_lanes(sum);
    }
  });
}

double sum_of_squared_updates(const CameRows& part) {
  double all = 0;
  with_gradients(part.grads, [&](auto* grads) HWY_ATTR {
    for (size_t r = 0; r < part.rows; ++r) {
      auto* row = grads + r * part.columns;
      const Vec factor = set(part.grads.scale * part.row_roots[r]);
      for (size_t begin = 0; begin < part.columns; begin += kSummedInF32) {
        Vec sum = set(0);
        for_each_vector(std::min(kSummedInF32, part.columns - begin), [&](size_t i, size_t count) HWY_ATTR {
          const size_t c = begin + i;
          fetch_ahead(row + c);
          const Vec u = hn::Mul(hn::Mul(load(row + c, count), factor), load(part.column_roots + c, count));
          sum = hn::MulAdd(u, u, sum);
        });
        all += sum_lanes(sum);
      }
    }
  });
  return all;
}

void move_mean(const CameRows& part, float update_scale, CameAverage average_of, float eps_value) {
  const Average average(average_of);
  const Vec eps = set(eps_value);
  with_gradients(part.grads, [&](auto* grads) HWY_ATTR {
    for (size_t r = 0; r < part.rows; ++r) {
      auto* row = grads + r * part.columns;
      float* mean = part.mean + r * part.columns;
      const Vec factor = set(part.grads.scale * part.row_roots[r] * update_scale);
      Vec sum = set(0);
      for_each_vector(part.columns, [&](size_t c, size_t count) HWY_ATTR {
        fetch_ahead(row + c);
        fetch_ahead(mean + c);
        const Vec u = hn::Mul(hn::Mul(load(row + c, count), factor), load(part.column_roots + c, count));
        const Vec m = average.moved(load(mean + c, count), u);
        store(m, mean + c, count);
        const Vec distance = hn::Sub(u, m);
        add_to_sums(hn::MulAdd(distance, distance, eps), part.column_sums + c, sum, count);
      });
      part.row_sums[r] += sum_lanes(sum);
    }
  });
}

template <class TCompute>
void move_weights_and(const CameRows& part, float lr, float decay_value, TCompute* all_compute) {
  const Vec decay = set(decay_value);
  for (size_t r = 0; r < part.rows; ++r) {
    const float* mean = part.mean + r * part.columns;
    float* weights = part.weights + r * part.columns;
    TCompute* compute = all_compute + r * part.columns;
    const bool streams = part.compute.streams && can_stream(compute);
    const Vec factor = set(lr * part.row_roots[r]);
    for_each_vector(part.columns, [&](size_t c, size_t count) HWY_ATTR {
      fetch_ahead(mean + c);
      fetch_ahead(weights + c);
      const Vec u = hn::Mul(hn::Mul(load(mean + c, count), factor), load(part.column_roots + c, count));
      const Vec moved = hn::Sub(decayed(load(weights + c, count), decay), u);
      store(moved, weights + c, count);
      store_weights(moved, compute + c, count, streams);
    });
  }
  if (part.compute.streams) hwy::FlushStream();
}

void move_weights(const CameRows& part, float lr, float decay) {
  with_compute(part.compute.values, part.compute.dtype,
               [&](auto* compute) HWY_ATTR { move_weights_and(part, lr, decay, compute); });
}

double square_elements(const CameElementRange& range, CameAverage average_of, float eps_value) {
  const Average average(average_of);
  const Vec scale = set(range.grads.scale), eps = set(eps_value);
  double all = 0;
  with_gradients(range.grads, [&](auto* grads) HWY_ATTR {
    for (size_t begin = 0; begin < range.size; begin += kSummedInF32) {
      Vec sum = set(0);
      for_each_vector(std::min(kSummedInF32, range.size - begin), [&](size_t j, size_t count) HWY_ATTR {
        const size_t i = begin + j;
        fetch_ahead(grads + i);
        fetch_ahead(range.squares + i);
        const Vec g = hn::Mul(load(grads + i, count), scale), g2 = hn::Mul(g, g);
        const Vec square = average.moved(load(range.squares + i, count), hn::Add(g2, eps));
        store(square, range.squares + i, count);
        sum = hn::Add(sum, first(hn::Div(g2, square), count));
      });
      all += sum_lanes(sum);
    }
  });
  return all;
}

template <class T, class TCompute>
void move_elements_and(const CameElementRange& range, const T* grads, const CameElementStep& step,
                       TCompute* compute) {
  const Vec scale = set(range.grads.scale * step.update_scale), lr = set(step.lr), decay = set(step.decay);
  const Average of_updates(step.mean), of_distances(step.distance);
  const Vec eps = set(step.eps_distance);
  const bool streams = range.compute.streams && can_stream(compute);
  for_each_vector(range.size, [&](size_t i, size_t count) HWY_ATTR {
    fetch_ahead(grads + i);
    fetch_ahead(range.squares + i);
    fetch_ahead(range.mean + i);
    fetch_ahead(range.weights + i);
    const Vec u = hn::Div(hn::Mul(load(grads + i, count), scale), hn::Sqrt(load(range.squares + i, count)));
    const Vec m = of_updates.moved(load(range.mean + i, count), u);
    store(m, range.mean + i, count);
    Vec update = m;
    if (range.distances) {
      fetch_ahead(range.distances + i);
      const Vec distance = hn::Sub(u, m);
      const Vec average =
          of_distances.moved(load(range.distances + i, count), hn::MulAdd(distance, distance, eps));
      store(average, range.distances + i, count);
      update = hn::Div(m, hn::Sqrt(average));
    }
    const Vec moved = hn::NegMulAdd(update, lr, decayed(load(range.weights + i, count), decay));
    store(moved, range.weights + i, count);
    store_weights(moved, compute + i, count, streams);
  });
  if (streams) hwy::FlushStream();
}

void move_elements(const CameElementRange& range, const CameElementStep& step) {
  with_gradients(range.grads, [&](auto* grads) HWY_ATTR {
    with_compute(range.compute.values, range.compute.dtype,
                 [&](auto* compute) HWY_ATTR { move_elements_and(range, grads, step, compute); });
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace kiln::ops::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kiln::ops::cpu {

HWY_EXPORT(add_squares);
HWY_EXPORT(sum_of_squared_updates);
HWY_EXPORT(move_mean);
HWY_EXPORT(move_weights);
HWY_EXPORT(square_elements);
HWY_EXPORT(move_elements);

void came_add_squares(const CameRows& part, float eps) { HWY_DYNAMIC_DISPATCH(add_squares)(part, eps); }
double came_sum_of_squares(const CameRows& part) {
  return HWY_DYNAMIC_DISPATCH(sum_of_squared_updates)(part);
}
void came_move_mean(const CameRows& part, float scale, CameAverage average, float eps) {
  HWY_DYNAMIC_DISPATCH(move_mean)(part, scale, average, eps);
}
void came_move_weights(const CameRows& part, float lr, float decay) {
  HWY_DYNAMIC_DISPATCH(move_weights)(part, lr, decay);
}
double came_square_elements(const CameElementRange& range, CameAverage average, float eps) {
  return HWY_DYNAMIC_DISPATCH(square_elements)(range, average, eps);
}
void came_move_elements(const CameElementRange& range, const CameElementStep& step) {
  HWY_DYNAMIC_DISPATCH(move_elements)(range, step);
}

}  // namespace kiln::ops::cpu
#endif
