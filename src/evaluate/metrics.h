// The metrics, from features alone. f64 on the CPU throughout.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "evaluate/statistics.h"

namespace kiln {

// Frechet distance of two Gaussians: |mu_a - mu_b|^2 + tr(A + B - 2 (A B)^(1/2)) (Heusel et al. 2017). The
// trace of the root is the sum of the roots of the eigenvalues of S^T B S with A = S S^T, which is symmetric
// and of A's rank, so that fewer samples than dimensions are no trouble. Throws Error when the widths differ.
double frechet_distance(const GaussianStatistics& a, const GaussianStatistics& b);

// Inception Score (Salimans et al. 2016): exp of the mean KL divergence of p(y|x) from p(y), by split.
struct InceptionScore {
  double mean = 0, deviation = 0;  // over the splits; the population's deviation
};
// Splits are i * N // splits, in the order of the pictures. Streams: picture i is added once, by anyone.
class InceptionScoreSums {
 public:
  // Throws Error: no splits, or more than pictures.
  InceptionScoreSums(int64_t num_pictures, int64_t num_splits);
  // logits (B, K) without fc's bias, of pictures [first, first + B).
  void add(int64_t first, const at::Tensor& logits);
  // Sums as they are added up over processes; (splits, K + 2).
  at::Tensor& sums() { return sums_; }
  InceptionScore finish() const;

 private:
  int64_t num_pictures_, num_splits_;
  at::Tensor sums_;  // by split: sum of p, then sum of p log p over classes, then the number of pictures
};
InceptionScore inception_score(const at::Tensor& logits, int64_t num_splits);

// Improved precision and recall (Kynkaanniemi et al. 2019) as ADM's evaluator: a point is covered when its
// distance to some point of the other set is at most that point's distance to its k-th nearest other point of
// its own set; distances are compared in f32.
struct PrecisionRecall {
  double precision = 0;  // share of the generated points that the reference covers
  double recall = 0;     // share of the reference points that the generated ones cover
};
// reference (N, D), generated (M, D). Throws Error unless 1 <= k < N, M.
PrecisionRecall precision_recall(const at::Tensor& reference, const at::Tensor& generated, int64_t k = 3);

// What the metrics hold at most beside their arguments, of N and M features of width D: copies in f64 and
// eigenvectors with LAPACK's workspace.
int64_t metric_scratch_bytes(int64_t width, int64_t num_reference, int64_t num_generated);

// Unbiased squared maximum mean discrepancy with the kernel (x.y / D + 1)^3 (Binkowski et al. 2018) over all
// samples, without subsets; may be negative. a (N, D), b (M, D). Throws Error for fewer than two of either.
double kernel_distance(const at::Tensor& a, const at::Tensor& b);

}  // namespace kiln
