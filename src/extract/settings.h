// What the options of `kiln extract` come to on this machine, and what the store says of them.
#pragma once
#include <ATen/core/Tensor.h>

#include "data/images/image_dataset.h"
#include "data/store/feature_store.h"
#include "extract/extract.h"
#include "models/autoencoders/autoencoder.h"

namespace kiln {

struct ExtractSettings {
  at::Device device = at::kCPU;
  at::ScalarType compute_dtype = at::kFloat;
  int64_t num_flips = 1;
  int64_t batch = 1;
  int num_workers = 1;  // threads that decode, of this rank
};
// `cpu_share`: processors of this rank (parallel/cpu_share.h). Throws Error: impossible values.
ExtractSettings resolve(const ExtractOptions& options, int64_t local_rank, int64_t cpu_share);

// All that changes the bytes of the samples, so that a run which would continue with other settings is
// refused, and where the autoencoder lies.
StoreInfo make_store_info(const ExtractOptions& options, const ExtractSettings& settings,
                          const ImageDataset& dataset, const Autoencoder& autoencoder);

}  // namespace kiln
