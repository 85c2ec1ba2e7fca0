// What --data and --autoencoder say of a run before it starts.
#pragma once
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "models/text/text_registry.h"
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

// The text encoder that encodes captions while a run trains.
struct PlannedTextEncoder {
  std::unique_ptr<TextEncoder> encoder;  // its weights are on meta, of the dtypes they are to have
  std::string assumed;     // the published one of the model's width that stands for it; "": it is here
  int64_t room_bytes = 0;  // --text-encoder-memory; 0: all it wants
};
// Empty: the run encodes no captions. `data`: of the run. Throws Error: it is not here, and none that is
// known fits the model.
std::optional<PlannedTextEncoder> planned_text_encoder(const TrainOptions& options, const DataShape& data);

// The autoencoder that a run loads.
struct PlannedAutoencoder {
  nlohmann::json config;
  std::string assumed{};  // whose config it is, where the run's own is not here
};
// To encode images, or to decode the samples of a store that one has made. Empty: the run loads none.
std::optional<PlannedAutoencoder> planned_autoencoder(const TrainOptions& options, const DataShape& data);

}  // namespace kiln
