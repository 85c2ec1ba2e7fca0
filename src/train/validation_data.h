// --validation-data: a feature store, or images that are encoded on the way, as --data; checked against what
// is trained on.
#pragma once
#include "train/training_data.h"

namespace kiln {

struct ValidationData {
  int64_t num_samples = 0;
  std::string identity{};  // names the samples' content
  BatchMaker batches{};
};

// `data`: what is trained on, whose autoencoder encodes the images. Throws Error saying what to do: another
// image size, autoencoder or other classes than those, no samples, images and no autoencoder at hand.
ValidationData open_validation_data(const TrainOptions& options, const TrainingData& data, at::Device device);

}  // namespace kiln
