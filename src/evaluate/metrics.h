// Computes the metrics from features, in f64 on the CPU.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace kiln {

// Mean and covariance of a set of feature vectors, in f64 on the CPU.
struct GaussianStatistics {
  at::Tensor mu{};     // (D)
  at::Tensor sigma{};  // (D, D), with N - 1 in the denominator
  int64_t count = 0;   // N; 0 if not known (read from a file)
};

class FeatureStatistics {
 public:
  // Adds features (B, D) of any floating type and device. Throws Error if D differs from the first batch's.
  void add(const at::Tensor& features);
  void merge(const FeatureStatistics& other);
  int64_t count() const { return count_; }
  // Throws Error for fewer than two features.
  GaussianStatistics finish() const;

  // For the way between processes.
  std::string to_bytes() const;
  static FeatureStatistics from_bytes(const std::string& bytes);

 private:
  void add_moments(int64_t count, const at::Tensor& mean, const at::Tensor& scatter);

  int64_t count_ = 0;
  at::Tensor mean_, scatter_;  // scatter: the sum of (x - mean)(x - mean)^T
};

// Returns the Frechet distance of two Gaussians: |mu_a - mu_b|^2 + tr(A + B - 2 (A B)^(1/2)) (Heusel et al.
// 2017). The trace of the root is the sum of the roots of the eigenvalues of S^T B S with A = S S^T. That
// matrix is symmetric and has A's rank, so fewer samples than dimensions do no harm. Throws Error if the
// widths differ.
double frechet_distance(const GaussianStatistics& a, const GaussianStatistics& b);

// Inception Score (Salimans et al. 2016): exp of the mean KL divergence of p(y|x) from p(y), by split.
struct InceptionScore {
  double mean = 0, deviation = 0;  // over the splits; deviation of the population
};
// Sums the score as pictures stream in. Each picture is added once, by any rank. Split i begins at picture
// i * N // splits.
class InceptionScoreSums {
 public:
  // Throws Error: no splits, or more splits than pictures.
  InceptionScoreSums(int64_t num_pictures, int64_t num_splits);
  // Adds pictures [first, first + B). logits (B, K): without fc's bias.
  void add(int64_t first, const at::Tensor& logits);
  // The sums, (splits, K + 2), to add up over processes.
  at::Tensor& sums() { return sums_; }
  InceptionScore finish() const;

 private:
  int64_t num_pictures_, num_splits_;
  at::Tensor sums_;  // by split: sum of p, sum of p log p over classes, number of pictures
};
InceptionScore inception_score(const at::Tensor& logits, int64_t num_splits);

// Improved precision and recall (Kynkaanniemi et al. 2019) as in ADM's evaluator. A point is covered if it
// lies within the radius of some point of the other set. The radius is that point's distance to the k-th
// nearest other point of its own set. Distances are compared in f32.
struct PrecisionRecall {
  double precision = 0;  // share of the generated points that the reference covers
  double recall = 0;     // share of the reference points that the generated ones cover
};
// reference (N, D), generated (M, D). Throws Error unless 1 <= k < N, M.
PrecisionRecall precision_recall(const at::Tensor& reference, const at::Tensor& generated, int64_t k = 3);

// Returns the most bytes that the metrics hold beside their arguments: f64 copies, and eigenvectors with
// LAPACK's workspace.
int64_t metric_scratch_bytes(int64_t width, int64_t num_reference, int64_t num_generated);

// Returns the unbiased squared maximum mean discrepancy with the kernel (x.y / D + 1)^3 (Binkowski et al.
// 2018), over all samples without subsets. It may be negative. a (N, D), b (M, D). Throws Error for fewer
// than two of either.
double kernel_distance(const at::Tensor& a, const at::Tensor& b);

}  // namespace kiln
