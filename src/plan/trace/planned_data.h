// What --data and --autoencoder say of a run before it starts.
#pragma once
#include <optional>

#include "models/autoencoders/autoencoder_kl.h"
#include "train/setup.h"

namespace kiln {

bool is_store(const TrainOptions& options);  // --data is a feature store
// Images are encoded on the way: --data are images, or a plan has an autoencoder and no data.
bool encodes_images(const TrainOptions& options);
// The same of --validation-data, at every validation.
bool encodes_validation_images(const TrainOptions& options);

// The shape of --data; without it, that of synthetic data. Throws Error: data that are not there, or do not
// fit
// --image-size.
DataShape planned_shape(const TrainOptions& options);

// The autoencoder that a run loads.
struct PlannedAutoencoder {
  AutoencoderKlConfig config;
  bool is_here = false;  // else the config is KL-f8's
};
// To encode images, or to decode the samples of a store that one has made. Empty: the run loads none.
std::optional<PlannedAutoencoder> planned_autoencoder(const TrainOptions& options, const DataShape& data);

}  // namespace kiln
