// The passes of one update by CAME (Luo et al. 2023) over a tensor. Between them the sums over a matrix or
// the whole tensor are finished, of which other ranks may hold parts. On a CPU each pass reads and writes its
// operands once; elsewhere it is composed of ATen's operations.
#pragma once
#include <ATen/core/Tensor.h>

namespace kiln::ops {

// A value for each row and one for each column of M matrices of R rows and C columns.
struct RowsAndColumns {
  at::Tensor rows{};     // (M, R) f32, contiguous in a matrix
  at::Tensor columns{};  // (M, C) f32, contiguous in a matrix
};

// Gradients and what they are multiplied by before anything else.
struct ScaledGradients {
  at::Tensor values;  // f32, bf16 or fp16, contiguous
  double scale = 1;
};

// Tensors that are kept by the means of their rows and columns: gradients, means and weights are (M, R, C).

// Adds the sums of (scale g)^2 + eps over the columns to sums.rows, over the rows to sums.columns.
void came_add_squares(const ScaledGradients& grads, double eps, const RowsAndColumns& sums);
// The sum of u^2, 0-d f64, where u = scale g root(row) root(column).
at::Tensor came_sum_of_squares(const ScaledGradients& grads, const RowsAndColumns& roots);
// Moves `mean` (f32) to u / divisor by the share 1 - beta, then adds the sums of (u / divisor - mean)^2 + eps
// to `distances`. `divisor`: 0-d f32.
void came_move_mean(const ScaledGradients& grads, const RowsAndColumns& roots, const at::Tensor& divisor,
                    const at::Tensor& mean, double beta, double eps, const RowsAndColumns& distances);
// weights = weights (1 - decay) - lr mean root(row) root(column), all f32, and `compute` like them in bf16 or
// fp16, if it is defined.
void came_move_weights(const at::Tensor& weights, const at::Tensor& mean, const RowsAndColumns& roots,
                       double lr, double decay, const at::Tensor& compute = {});

// Tensors of which every element is kept: all operands are (n).

// Moves `squares` (f32) to (scale g)^2 + eps by the share 1 - beta. Returns the sum of u^2, 0-d f64, where
// u = scale g / sqrt(squares).
at::Tensor came_square_elements(const ScaledGradients& grads, const at::Tensor& squares, double beta,
                                double eps);

// What moves the elements.
struct CameElements {
  at::Tensor weights{}, mean{}, squares{};  // f32
  at::Tensor distances{};                   // f32; undefined: the mean is not divided by its distance's root
  at::Tensor compute{};                     // bf16 or fp16, or undefined: what the weights are rounded to
  double beta_mean = 0, beta_distance = 0, eps_distance = 0, lr = 0, decay = 0;
};
// came_move_mean() and came_move_weights() of u = scale g / sqrt(squares), where the mean's distances have
// an average of their own.
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
