// What --data and --autoencoder say of a run before it starts.
#pragma once
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "models/text/text_registry.h"
#include "train/setup.h"

namespace kiln {

// True if images are encoded on the way: --data is images, or a plan has an autoencoder and no data.
bool encodes_images(const TrainOptions& options);
// True if the images of a validation are encoded at every validation.
bool encodes_validation_images(const TrainOptions& options);

// Returns the shape of --data, or without it that of synthetic data. Throws Error if the data are not there
// or do not fit --image-size.
DataShape planned_shape(const TrainOptions& options);

// The text encoder that encodes captions while a run trains.
struct PlannedTextEncoder {
  std::unique_ptr<TextEncoder> encoder;  // its weights are on meta, in the dtypes they are to have
  std::string assumed;     // the published one of the model's width that stands in for it; "": it is here
  int64_t room_bytes = 0;  // --text-encoder-memory; 0: all it wants
};
// Returns nothing if the run encodes no captions. `data`: that of the run. Throws Error if the encoder is not
// here and no known one fits the model.
std::optional<PlannedTextEncoder> planned_text_encoder(const TrainOptions& options, const DataShape& data);

// The autoencoder that a run loads.
struct PlannedAutoencoder {
  nlohmann::json config;
  std::string assumed{};  // whose config it is, if the run's own is not here
};
// Returns the autoencoder that encodes images, or decodes the samples of a store that it has made. Nothing if
// the run loads none.
std::optional<PlannedAutoencoder> planned_autoencoder(const TrainOptions& options, const DataShape& data);

}  // namespace kiln
