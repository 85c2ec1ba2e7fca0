#include "evaluate/statistics.h"

#include <ATen/core/grad_mode.h>

#include <cstring>

#include "core/aten.h"
#include "core/error.h"

namespace kiln {

void FeatureStatistics::add(const at::Tensor& features) {
  if (features.dim() != 2) fail("evaluate", "expected features (B, D), got {} dimensions", features.dim());
  if (features.size(0) == 0) return;
  if (count_ > 0 && features.size(1) != mean_.size(0))
    fail("evaluate", "expected features of width {}, got {}", mean_.size(0), features.size(1));
  const at::NoGradGuard no_grad;
  const at::Tensor batch = features.to(at::kCPU, at::kDouble), mean = batch.mean(0);
  const at::Tensor centred = batch - mean;
  add_moments(batch.size(0), mean, centred.t().mm(centred));
}

// Combines the moments of two sets (Chan, Golub and LeVeque 1983).
void FeatureStatistics::add_moments(int64_t count, const at::Tensor& mean, const at::Tensor& scatter) {
  if (count_ == 0) {
    count_ = count;
    mean_ = mean;
    scatter_ = scatter;
    return;
  }
  const double mine = static_cast<double>(count_), theirs = static_cast<double>(count), all = mine + theirs;
  const at::Tensor difference = mean - mean_;
  scatter_.add_(scatter).addr_(difference, difference, /*beta=*/1, /*alpha=*/mine * theirs / all);
  mean_ = mean_ + difference * (theirs / all);
  count_ += count;
}

void FeatureStatistics::merge(const FeatureStatistics& other) {
  if (other.count_ > 0) add_moments(other.count_, other.mean_, other.scatter_.clone());
}

GaussianStatistics FeatureStatistics::finish() const {
  if (count_ < 2) fail("evaluate", "a covariance needs at least 2 pictures, got {}", count_);
  return {.mu = mean_, .sigma = scatter_ / static_cast<double>(count_ - 1), .count = count_};
}

std::string FeatureStatistics::to_bytes() const {
  const int64_t width = count_ > 0 ? mean_.size(0) : 0;
  std::string bytes(sizeof(int64_t) * 2, '\0');
  std::memcpy(bytes.data(), &count_, sizeof count_);
  std::memcpy(bytes.data() + sizeof count_, &width, sizeof width);
  if (count_ == 0) return bytes;
  for (const at::Tensor& part : {mean_.contiguous(), scatter_.contiguous()})
    bytes.append(static_cast<const char*>(part.const_data_ptr()), part.nbytes());
  return bytes;
}

FeatureStatistics FeatureStatistics::from_bytes(const std::string& bytes) {
  FeatureStatistics statistics;
  int64_t width = 0;
  std::memcpy(&statistics.count_, bytes.data(), sizeof(int64_t));
  std::memcpy(&width, bytes.data() + sizeof(int64_t), sizeof(int64_t));
  if (statistics.count_ == 0) return statistics;
  statistics.mean_ = at::empty({width}, at::kDouble);
  statistics.scatter_ = at::empty({width, width}, at::kDouble);
  const char* next = bytes.data() + 2 * sizeof(int64_t);
  for (const at::Tensor& part : {statistics.mean_, statistics.scatter_}) {
    std::memcpy(part.data_ptr(), next, part.nbytes());
    next += part.nbytes();
  }
  return statistics;
}

}  // namespace kiln
