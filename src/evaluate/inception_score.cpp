#include <ATen/core/grad_mode.h>

#include <cmath>

#include "core/aten.h"
#include "core/error.h"
#include "evaluate/metrics.h"

namespace kiln {

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

}  // namespace kiln
