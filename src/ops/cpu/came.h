// The passes of CAME over a part of a tensor, in plain pointers. ops/update/came.h says what each computes.
#pragma once
#include <cstddef>

#include "core/dtype.h"

namespace kiln::ops::cpu {

// Gradients, multiplied by `scale` before anything else.
struct CameGradients {
  const void* values = nullptr;
  Dtype dtype = Dtype::kF32;
  float scale = 1;
};

// average = beta average + share value. The share is 1 - beta, computed before beta is rounded to f32: for a
// beta near 1 it would otherwise be off by a ten-thousandth.
struct CameAverage {
  explicit CameAverage(double beta_in)
      : beta(static_cast<float>(beta_in)), share(static_cast<float>(1 - beta_in)) {}
  float beta, share;
};

// A bf16 or fp16 copy of the moved weights, or null for none.
struct CameComputeWeights {
  void* values = nullptr;
  Dtype dtype = Dtype::kF32;
  bool streams = false;  // write around the caches: there are too many to stay in them
};

// Whole consecutive rows of one matrix. A pass reads and writes the fields that it needs.
struct CameRows {
  size_t rows = 0, columns = 0;
  CameGradients grads{};
  const float *row_roots = nullptr, *column_roots = nullptr;
  float *mean = nullptr, *weights = nullptr;
  float *row_sums = nullptr, *column_sums = nullptr;
  CameComputeWeights compute{};
};
void came_add_squares(const CameRows& part, float eps);
double came_sum_of_squares(const CameRows& part);
void came_move_mean(const CameRows& part, float scale, CameAverage average,
                    float eps);  // scale: multiplies the updates
void came_move_weights(const CameRows& part, float lr, float decay);

// Elements whose squares are kept one by one. `distances` may be null.
struct CameElementRange {
  size_t size;
  CameGradients grads;
  float *weights, *mean, *squares, *distances;
  CameComputeWeights compute;
};
struct CameElementStep {
  float update_scale;
  CameAverage mean, distance;
  float eps_distance, lr, decay;
};
double came_square_elements(const CameElementRange& range, CameAverage average, float eps);
void came_move_elements(const CameElementRange& range, const CameElementStep& step);

}  // namespace kiln::ops::cpu
