// Mean and covariance of features that come in batches. All 50,000 x 2048 features are never held at once.
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

}  // namespace kiln
