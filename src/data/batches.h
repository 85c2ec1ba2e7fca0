// The loader: the global stream of samples, drawn ahead of time (architecture, decision 4).
#pragma once
#include <memory>

#include "data/batch.h"
#include "data/feature_store.h"

namespace kiln {

struct BatchOptions {
  uint64_t seed = 0;
  int64_t global_batch = 0;
  int64_t rank = 0, world_size = 1;  // this rank's rows, see rank_rows()
  double class_dropout_prob = 0;     // label -> null_class with this probability
  int64_t null_class = -1;
  bool draw_posterior = true;  // false: the mean itself
  bool flip = true;            // with a store of two flips, or on pixels: mirror with probability 1/2
  int num_threads = 1;
  int64_t prefetch = 4;  // batches ready ahead
};

// Rows [first, first + count) of the global batch are `rank`'s. Ranks' counts differ by one at most.
struct RowRange {
  int64_t first = 0, count = 0;
};
RowRange rank_rows(int64_t global_batch, int64_t rank, int64_t world_size);

// Each epoch is a shuffle of all samples by (seed, epoch); an epoch's tail joins the next one's head, so
// nothing is dropped and every batch is full, however small the store. Every draw is keyed by the sample's
// position in the stream: another global batch, rank count or number of threads changes none. Throws Error
// for impossible options.
std::unique_ptr<BatchSource> store_batches(std::shared_ptr<FeatureStore> store, const BatchOptions& options);

// Random latents and labels of the right shape (--data synthetic). num_classes 0: no labels.
std::unique_ptr<BatchSource> synthetic_batches(int64_t channels, int64_t height, int64_t width,
                                               int64_t num_classes, const BatchOptions& options);

// What the loader draws at a position of the stream, without it: the sample (num_samples 0: endless synthetic
// data) and the number in [0, 1) that its timestep is made of.
int64_t sample_at(uint64_t seed, int64_t num_samples, int64_t position);
double time_uniform_at(uint64_t seed, int64_t position);

}  // namespace kiln
