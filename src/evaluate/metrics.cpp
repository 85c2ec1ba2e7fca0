#include "evaluate/metrics.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/aten.h"
#include "core/error.h"

namespace kiln {

namespace {

// Returns the bound below which an eigenvalue is only rounding. Its root would be much larger than rounding.
double rounding_of(const at::Tensor& eigenvalues) {
  return std::numeric_limits<double>::epsilon() * static_cast<double>(eigenvalues.numel()) *
         std::max(eigenvalues.abs().max().item<double>(), std::numeric_limits<double>::min());
}

// Returns S (D, rank) with sigma = S S^T.
at::Tensor factor_of(const at::Tensor& sigma) {
  const auto [values, vectors] = at::linalg_eigh((sigma + sigma.t()) / 2);  // ascending
  const int64_t rank = (values > rounding_of(values)).sum().item<int64_t>();
  const int64_t first = values.numel() - rank;
  return vectors.narrow(1, first, rank) * values.narrow(0, first, rank).sqrt();
}

constexpr int64_t kBlock = 1024;  // points of a set per pass

int64_t block_size(const at::Tensor& points, int64_t first) {
  return std::min(kBlock, points.size(0) - first);
}

at::Tensor as_f64(const at::Tensor& points) { return points.to(at::kCPU, at::kDouble).contiguous(); }

// Returns the distances, (n, m) f32. The product form cancels for points that nearly coincide, so those pairs
// are subtracted instead: equal points have distance 0.
at::Tensor distances(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor squares_a = (a * a).sum(1, /*keepdim=*/true), squares_b = (b * b).sum(1);
  at::Tensor squared = (squares_a + squares_b - 2 * a.mm(b.t())).clamp_min(0);
  const at::Tensor close = (squared < 1e-6 * (squares_a + squares_b)).nonzero();
  if (close.size(0) > 0) {
    constexpr int64_t kPairs = 65536;  // per pass
    for (int64_t first = 0; first < close.size(0); first += kPairs) {
      const at::Tensor pairs = close.narrow(0, first, std::min(kPairs, close.size(0) - first));
      const at::Tensor rows = pairs.select(1, 0), columns = pairs.select(1, 1);
      const at::Tensor difference = a.index_select(0, rows) - b.index_select(0, columns);
      squared.index_put_({rows, columns}, (difference * difference).sum(1));
    }
  }
  return squared.sqrt().to(at::kFloat);
}

// Returns each point's distance to its k-th nearest other point, (N) f32.
at::Tensor radii_of(const at::Tensor& points, int64_t k) {
  std::vector<at::Tensor> radii;
  for (int64_t first = 0; first < points.size(0); first += kBlock) {
    const at::Tensor rows = points.narrow(0, first, block_size(points, first));
    at::Tensor nearest;  // (rows, k) among the points seen so far
    for (int64_t other = 0; other < points.size(0); other += kBlock) {
      at::Tensor block = distances(rows, points.narrow(0, other, block_size(points, other)));
      if (other == first) block.diagonal().fill_(std::numeric_limits<float>::infinity());
      if (nearest.defined()) block = at::cat({nearest, block}, 1);
      nearest = std::get<0>(block.topk(std::min(k, block.size(1)), 1, /*largest=*/false));
    }
    radii.push_back(std::get<0>(nearest.max(1)));
  }
  return at::cat(radii);
}

// Returns the share of `points` that lie within the radius of at least one of `centres`.
double share_covered(const at::Tensor& points, const at::Tensor& centres, const at::Tensor& radii) {
  int64_t covered = 0;
  for (int64_t first = 0; first < points.size(0); first += kBlock) {
    const at::Tensor rows = points.narrow(0, first, block_size(points, first));
    at::Tensor is_covered = at::zeros({rows.size(0)}, at::kBool);
    for (int64_t other = 0; other < centres.size(0); other += kBlock) {
      const int64_t count = block_size(centres, other);
      is_covered.logical_or_(
          (distances(rows, centres.narrow(0, other, count)) <= radii.narrow(0, other, count)).any(1));
    }
    covered += is_covered.sum().item<int64_t>();
  }
  return static_cast<double>(covered) / static_cast<double>(points.size(0));
}

// Sums the kernel over all pairs. For one set (`same_set`), only pairs of different points count.
double kernel_sum(const at::Tensor& a, const at::Tensor& b, bool same_set) {
  double sum = 0;
  const double width = static_cast<double>(a.size(1));
  for (int64_t first = 0; first < a.size(0); first += kBlock) {
    const at::Tensor rows = a.narrow(0, first, block_size(a, first));
    for (int64_t other = 0; other < b.size(0); other += kBlock) {
      at::Tensor kernel = (rows.mm(b.narrow(0, other, block_size(b, other)).t()) / width + 1).pow(3);
      if (same_set && first == other) kernel.diagonal().zero_();
      sum += kernel.sum().item<double>();
    }
  }
  return sum;
}

void check_sets(const at::Tensor& a, const at::Tensor& b) {
  if (a.dim() != 2 || b.dim() != 2 || a.size(1) != b.size(1))
    fail("evaluate", "expected two sets of features of one width, got {} and {}",
         a.dim() == 2 ? a.size(1) : -1, b.dim() == 2 ? b.size(1) : -1);
}

}  // namespace

double frechet_distance(const GaussianStatistics& a, const GaussianStatistics& b) {
  if (!a.mu.sizes().equals(b.mu.sizes()))
    fail("evaluate", "expected features of one width, got {} and {}", a.mu.numel(), b.mu.numel());
  const at::NoGradGuard no_grad;
  const at::Tensor factor = factor_of(a.sigma);
  double trace_of_root = 0;
  if (factor.size(1) > 0) {
    const at::Tensor product = factor.t().mm(b.sigma.mm(factor));
    const at::Tensor values = at::linalg_eigvalsh((product + product.t()) / 2);
    const double rounding = rounding_of(values);
    trace_of_root = at::where(values > rounding, values, at::zeros_like(values)).sqrt().sum().item<double>();
  }
  const at::Tensor difference = a.mu - b.mu;
  return difference.dot(difference).item<double>() + a.sigma.trace().item<double>() +
         b.sigma.trace().item<double>() - 2 * trace_of_root;
}

InceptionScoreSums::InceptionScoreSums(int64_t num_pictures, int64_t num_splits)
    : num_pictures_(num_pictures), num_splits_(num_splits) {
  if (num_splits < 1 || num_splits > num_pictures)
    fail("evaluate", "expected 1 to {} splits of the Inception Score, got {}", num_pictures, num_splits);
}

void InceptionScoreSums::add(int64_t first, const at::Tensor& logits) {
  const at::NoGradGuard no_grad;
  const int64_t num_classes = logits.size(1);
  if (!sums_.defined()) sums_ = at::zeros({num_splits_, num_classes + 2}, at::kDouble);
  const at::Tensor log_p = logits.to(at::kCPU, at::kDouble).log_softmax(1), p = log_p.exp();
  for (int64_t split = 0; split < num_splits_; ++split) {
    const int64_t begin = std::max(split * num_pictures_ / num_splits_, first),
                  end = std::min((split + 1) * num_pictures_ / num_splits_, first + logits.size(0));
    if (begin >= end) continue;
    const at::Tensor rows = p.narrow(0, begin - first, end - begin);
    at::Tensor sums = sums_.select(0, split);
    sums.narrow(0, 0, num_classes).add_(rows.sum(0));
    sums.select(0, num_classes).add_((rows * log_p.narrow(0, begin - first, end - begin)).sum());
    sums.select(0, num_classes + 1).add_(static_cast<double>(end - begin));
  }
}

InceptionScore InceptionScoreSums::finish() const {
  const int64_t num_classes = sums_.size(1) - 2;
  double sum = 0, squares = 0;
  for (int64_t split = 0; split < num_splits_; ++split) {
    const at::Tensor sums = sums_.select(0, split);
    const double count = sums.select(0, num_classes + 1).item<double>();
    const at::Tensor marginal = sums.narrow(0, 0, num_classes) / count;
    // A class with probability 0 in every picture adds nothing.
    const at::Tensor entropy =
        at::where(marginal > 0, marginal * marginal.log(), at::zeros_like(marginal)).sum();
    const double score =
        std::exp(sums.select(0, num_classes).item<double>() / count - entropy.item<double>());
    sum += score;
    squares += score * score;
  }
  const double splits = static_cast<double>(num_splits_), mean = sum / splits;
  return {.mean = mean, .deviation = std::sqrt(std::max(0.0, squares / splits - mean * mean))};
}

InceptionScore inception_score(const at::Tensor& logits, int64_t num_splits) {
  if (logits.dim() != 2) fail("evaluate", "expected logits (N, K), got {} dimensions", logits.dim());
  InceptionScoreSums sums(logits.size(0), num_splits);
  sums.add(0, logits);
  return sums.finish();
}

PrecisionRecall precision_recall(const at::Tensor& reference, const at::Tensor& generated, int64_t k) {
  check_sets(reference, generated);
  const int64_t fewest = std::min(reference.size(0), generated.size(0));
  if (k < 1 || k >= fewest)
    fail("evaluate", "precision and recall with k = {} need more than {} pictures, got {}", k, k, fewest);
  const at::NoGradGuard no_grad;
  const at::Tensor real = as_f64(reference), made = as_f64(generated);
  const at::Tensor real_radii = radii_of(real, k), made_radii = radii_of(made, k);
  return {.precision = share_covered(made, real, real_radii),
          .recall = share_covered(real, made, made_radii)};
}

int64_t metric_scratch_bytes(int64_t width, int64_t num_reference, int64_t num_generated) {
  constexpr int64_t kF64 = sizeof(double), kSquares = 4;  // alive at once in frechet_distance()
  const int64_t most = std::min(kBlock, std::max(num_reference, num_generated));
  const int64_t pairs = (num_reference + num_generated) * width + kSquares * most * most;
  return kF64 * std::max(kSquares * width * width, pairs);
}

double kernel_distance(const at::Tensor& a, const at::Tensor& b) {
  check_sets(a, b);
  const double n = static_cast<double>(a.size(0)), m = static_cast<double>(b.size(0));
  if (n < 2 || m < 2)
    fail("evaluate", "a kernel distance needs at least 2 pictures on each side, got {} and {}", n, m);
  const at::NoGradGuard no_grad;
  const at::Tensor x = as_f64(a), y = as_f64(b);
  return kernel_sum(x, x, true) / (n * (n - 1)) + kernel_sum(y, y, true) / (m * (m - 1)) -
         2 * kernel_sum(x, y, false) / (n * m);
}

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
