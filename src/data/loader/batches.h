// The loader: the global stream of samples, drawn ahead of time (architecture, decision 4).
#pragma once
#include <memory>

#include "data/loader/batch_draws.h"
#include "data/store/feature_store.h"
#include "data/text_store/text_store.h"

namespace kiln {

// Samples come in the order of SampleOrder. Every draw is keyed by the sample's position in the stream:
// another rank count or number of threads changes none. `text`: the samples' captions; null: batches have
// none. Throws Error for impossible options.
std::unique_ptr<BatchSource> store_batches(std::shared_ptr<FeatureStore> store, const BatchOptions& options,
                                           std::shared_ptr<const TextStore> text = nullptr);

// What the samples of a store look like, without captions.
DataShape store_shape(const StoreInfo& info);
// What the captions of a store look like, as often as its samples have each.
TextShape text_shape(const TextStore& store);

// Random latents, labels and captions of the right shapes (--data synthetic), batches of the lanes in turn.
std::unique_ptr<BatchSource> synthetic_batches(const DataShape& shape, const BatchOptions& options);

}  // namespace kiln
