// The reports of kiln store inspect and kiln store verify. Torch-free.
#pragma once
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "data/store/feature_store.h"

namespace kiln {

// Moments of a store's latents, from samples spread evenly over it.
struct LatentStatistics {
  int64_t num_samples = 0;  // that were measured
  struct Channel {
    double mean = 0, mean_std = 0;  // of the posterior means
    double sigma = 0;               // root mean square of the posterior's standard deviation
    double drawn_std() const;       // of latents drawn from the posterior
  };
  std::vector<Channel> channels;
  Channel all;
};
LatentStatistics measure_latents(const FeatureStore& store, int64_t max_samples);

// Prints what store.json, the shards and the text stores of each part hold, and the statistics of at most
// `max_samples` samples of it.
void inspect_store(const std::string& folder, int64_t max_samples, std::FILE* out);

// Checks every checksum, shape and value. Throws Error, after printing each problem, if there is any.
void verify_store(const std::string& folder, std::FILE* out);

}  // namespace kiln
