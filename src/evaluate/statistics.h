// Mean and covariance of features that come in batches: 50,000 x 2048 of them are never held.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace kiln {

// Describes a set of feature vectors, in f64 on the CPU.
struct GaussianStatistics {
  at::Tensor mu{};     // (D)
  at::Tensor sigma{};  // (D, D), with N - 1 in the denominator
  int64_t count = 0;   // N; 0: not known (read from a file)
};

class FeatureStatistics {
 public:
  // features (B, D) of any floating type and device; D is the first batch's. Throws Error for another D.
  void add(const at::Tensor& features);
  void merge(const FeatureStatistics& other);
  int64_t count() const { return count_; }
  // Throws Error for fewer than two features.
  GaussianStatistics finish() const;

  // On the way between processes.
  std::string to_bytes() const;
  static FeatureStatistics from_bytes(const std::string& bytes);

 private:
  void add_moments(int64_t count, const at::Tensor& mean, const at::Tensor& scatter);

  int64_t count_ = 0;
  at::Tensor mean_, scatter_;  // scatter: the sum of (x - mean)(x - mean)^T
};

}  // namespace kiln
