// What a feature store says of itself when kiln extract makes it.
#pragma once
#include "data/images/image_dataset.h"
#include "data/store/feature_store.h"
#include "extract/extract_options.h"
#include "extract/picture_lanes.h"
#include "extract/settings.h"
#include "models/autoencoders/autoencoder.h"

namespace kiln {

// All that changes the bytes of the samples, so that a run which would continue with other settings is
// refused, and where the autoencoder lies.
StoreInfo make_store_info(const ExtractOptions& options, const ExtractSettings& settings,
                          const ImageDataset& dataset, const Autoencoder& autoencoder,
                          const PictureLanes& lanes);

}  // namespace kiln
