// The loader: the global stream of samples, drawn ahead of time (architecture, decision 4).
#pragma once
#include <memory>

#include "data/loader/batch_draws.h"
#include "data/store/feature_store.h"
#include "data/text_store/text_store.h"

namespace kiln {

// Returns batches of the store's samples in the order of SampleOrder. Every draw is keyed by the sample's
// position in the stream, so the number of ranks or threads changes none. `text` holds the samples' captions;
// null: batches have none. Throws Error for impossible options.
std::unique_ptr<BatchSource> store_batches(std::shared_ptr<FeatureStore> store, const BatchOptions& options,
                                           std::shared_ptr<const TextStore> text = nullptr);

// Returns the shape of a store's samples, without captions.
DataShape store_shape(const StoreInfo& info);
// Returns the shape of a store's captions. A caption of several samples counts several times in the mean.
TextShape text_shape(const TextStore& store);

// Returns batches of random latents, labels and captions of the right shapes (--data synthetic). The lanes
// take turns.
std::unique_ptr<BatchSource> synthetic_batches(const DataShape& shape, const BatchOptions& options);

}  // namespace kiln
