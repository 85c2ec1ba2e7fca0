// What the options of `kiln extract` come to on this machine, and what the store says of them.
#pragma once
#include <ATen/core/Tensor.h>

#include "data/feature_store.h"
#include "data/image_dataset.h"
#include "extract/extract.h"
#include "models/autoencoders/autoencoder.h"
#include "parallel/ranks.h"

namespace kiln {

struct ExtractSettings {
  at::Device device = at::kCPU;
  at::ScalarType compute_dtype = at::kFloat;
  int64_t num_flips = 1;
  int64_t batch = 1;
  int num_workers = 1;  // threads that decode, of this rank
};
// Throws Error: impossible values.
ExtractSettings resolve(const ExtractOptions& options, const Ranks& ranks);

// All that changes the bytes of the store, so that a run which would continue with other settings is refused.
StoreInfo make_store_info(const ExtractOptions& options, const ExtractSettings& settings,
                          const ImageDataset& dataset, const Autoencoder& autoencoder);

}  // namespace kiln
