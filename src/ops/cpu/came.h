// The passes of CAME over a part of a tensor, in plain pointers.
#pragma once
#include <cstddef>

#include "core/dtype.h"

namespace kiln::ops::cpu {

// Gradients, and what they are multiplied by first.
struct CameGradients {
  const void* values;
  Dtype dtype;
  float scale;
};

// average = beta average + share value, where share is 1 - beta before it was rounded to f32: of a beta near
// 1 it would be off by a ten-thousandth.
struct CameAverage {
  explicit CameAverage(double beta_in)
      : beta(static_cast<float>(beta_in)), share(static_cast<float>(1 - beta_in)) {}
  float beta, share;
};

// Whole rows of one matrix, one behind another. A pass reads and writes what it needs.
struct CameRows {
  size_t rows, columns;
  CameGradients grads;
  const float *row_roots, *column_roots;
  float *mean, *weights;
  float *row_sums, *column_sums;
};
void came_add_squares(const CameRows& part, float eps);
double came_sum_of_squares(const CameRows& part);
void came_move_mean(const CameRows& part, float scale, CameAverage average,
                    float eps);  // scale: of updates
void came_move_weights(const CameRows& part, float lr, float decay);

// Elements that are kept one by one. `distances` may be null.
struct CameElementRange {
  size_t size;
  CameGradients grads;
  float *weights, *mean, *squares, *distances;
};
struct CameElementStep {
  float update_scale;
  CameAverage mean, distance;
  float eps_distance, lr, decay;
};
double came_square_elements(const CameElementRange& range, CameAverage average, float eps);
void came_move_elements(const CameElementRange& range, const CameElementStep& step);

}  // namespace kiln::ops::cpu
