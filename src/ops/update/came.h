// The passes of one update by CAME (Luo et al. 2023) over a tensor. Between passes, the caller finishes the
// sums over a matrix or the whole tensor, parts of which other ranks may hold. On a CPU each pass reads and
// writes its operands once; elsewhere it is composed of ATen's operations.
#pragma once
#include <ATen/core/Tensor.h>

namespace kiln::ops {

// A value for each row and one for each column of M matrices of R rows and C columns.
struct RowsAndColumns {
  at::Tensor rows{};     // (M, R) f32, contiguous in a matrix
  at::Tensor columns{};  // (M, C) f32, contiguous in a matrix
};

// Gradients, which are multiplied by `scale` before anything else.
struct ScaledGradients {
  at::Tensor values;  // f32, bf16 or fp16, contiguous
  double scale = 1;
};

// For tensors whose squares are kept as means of rows and columns. Gradients, means and weights are (M, R,
// C).

// Adds (scale g)^2 + eps, summed over the columns, to sums.rows, and summed over the rows to sums.columns.
void came_add_squares(const ScaledGradients& grads, double eps, const RowsAndColumns& sums);
// Returns the sum of u^2, 0-d f64, where u = scale g root(row) root(column).
at::Tensor came_sum_of_squares(const ScaledGradients& grads, const RowsAndColumns& roots);
// Moves `mean` (f32) towards u / divisor by the share 1 - beta. Then adds the sums of (u / divisor - mean)^2
// + eps to `distances`. `divisor` is 0-d f32.
void came_move_mean(const ScaledGradients& grads, const RowsAndColumns& roots, const at::Tensor& divisor,
                    const at::Tensor& mean, double beta, double eps, const RowsAndColumns& distances);
// weights = weights (1 - decay) - lr mean root(row) root(column), all f32. `compute`, if defined, receives
// them in bf16 or fp16.
void came_move_weights(const at::Tensor& weights, const at::Tensor& mean, const RowsAndColumns& roots,
                       double lr, double decay, const at::Tensor& compute = {});

// For tensors whose squares are kept element by element: all operands are (n).

// Moves `squares` (f32) towards (scale g)^2 + eps by the share 1 - beta. Returns the sum of u^2, 0-d f64,
// where u = scale g / sqrt(squares).
at::Tensor came_square_elements(const ScaledGradients& grads, const at::Tensor& squares, double beta,
                                double eps);

// The state and the factors of a step over elements.
struct CameElements {
  at::Tensor weights{}, mean{}, squares{};  // f32
  at::Tensor distances{};                   // f32, or undefined: the mean is not divided by their root
  at::Tensor compute{};                     // bf16 or fp16 copy of the weights, or undefined
  double beta_mean = 0, beta_distance = 0, eps_distance = 0, lr = 0, decay = 0;
};
// Does came_move_mean() and came_move_weights() for u = scale g / sqrt(squares). The mean's distances have
// their own average.
void came_move_elements(const ScaledGradients& grads, const at::Tensor& divisor, const CameElements& e);

namespace reference {
void came_add_squares(const ScaledGradients& grads, double eps, const RowsAndColumns& sums);
at::Tensor came_sum_of_squares(const ScaledGradients& grads, const RowsAndColumns& roots);
void came_move_mean(const ScaledGradients& grads, const RowsAndColumns& roots, const at::Tensor& divisor,
                    const at::Tensor& mean, double beta, double eps, const RowsAndColumns& distances);
void came_move_weights(const at::Tensor& weights, const at::Tensor& mean, const RowsAndColumns& roots,
                       double lr, double decay, const at::Tensor& compute = {});
at::Tensor came_square_elements(const ScaledGradients& grads, const at::Tensor& squares, double beta,
                                double eps);
void came_move_elements(const ScaledGradients& grads, const at::Tensor& divisor, const CameElements& e);
}  // namespace reference

}  // namespace kiln::ops
