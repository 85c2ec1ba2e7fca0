// The loader: the global stream of samples, drawn ahead of time (architecture, decision 4).
#pragma once
#include <memory>

#include "data/loader/batch_draws.h"
#include "data/store/feature_store.h"

namespace kiln {

// Samples come in the order of SampleOrder. Every draw is keyed by the sample's position in the stream:
// another rank count or number of threads changes none. Throws Error for impossible options.
std::unique_ptr<BatchSource> store_batches(std::shared_ptr<FeatureStore> store, const BatchOptions& options);

// What the samples of a store look like.
DataShape store_shape(const StoreInfo& info);

// Random latents and labels of the right shapes (--data synthetic), batches of the lanes in turn.
std::unique_ptr<BatchSource> synthetic_batches(const DataShape& shape, const BatchOptions& options);

}  // namespace kiln
