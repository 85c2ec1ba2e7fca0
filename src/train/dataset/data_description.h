// What a run's data are, described once: for training, its stages, its validation and its plans. No weights
// are loaded.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/json.h"
#include "extract/encoded_text.h"
#include "extract/image_batches.h"
#include "models/conditioning.h"
#include "models/family.h"
#include "models/text/text_registry.h"
#include "train/dataset/data_source.h"

namespace kiln {

// What a run asks of its data, which follows from the shape of its model and the objective.
struct DataAsks {
  std::string model{};         // its name, for messages
  PublishedLatents latents{};  // of synthetic data, and of an autoencoder that is not here
  int64_t num_classes = 0;     // that the model has at least; 0: those of the data
  // Returns what the model is told beside the picture on samples of this shape. Captions of the shape are
  // ignored. Throws Error if the model does not take such samples.
  std::function<ConditioningShape(const DataShape&)> conditioning{};
  bool draws = false;                         // pictures are drawn and decoded
  at::ScalarType compute_dtype = at::kFloat;  // of encoders
};

// The autoencoder that encodes pictures, or else decodes what is drawn.
struct AutoencoderOutline {
  std::string path{};
  nlohmann::json config{};
  std::string assumed{};  // whose config it is, if nothing is at the path
};

// The text encoder that encodes captions while a run trains.
struct TextEncoderOutline {
  std::string folder{};
  const PublishedTextEncoder* assumed = nullptr;  // stands in for a folder that is not here
  int64_t room_bytes = 0;                         // --text-encoder-memory; 0: all it wants

  // Returns it with its weights on meta, in the dtypes they are to have. Throws Error.
  std::unique_ptr<TextEncoder> build(at::ScalarType dtype) const;
};

struct DataDescription {
  DataSource source{};
  DataAsks asks{};
  DataShape shape{};  // of the samples as the model sees them
  std::vector<std::string> class_names{};
  StoreInfo info{};                         // of all stores together
  std::vector<std::string> text_folders{};  // one for each part of the stores; empty: no captions are taken
  Pictures pictures{};                      // null: none are read, or they are not here
  std::shared_ptr<const TextStore> text{};  // captions of the samples; null: none are taken, or drawn ones
  // `text`, if captions are encoded while training. An outline of their encoder makes ids alone.
  std::shared_ptr<const EncodedText> captions{};
  std::optional<AutoencoderOutline> autoencoder{};
  std::optional<TextEncoderOutline> text_encoder{};
  std::vector<std::string> notes{};  // for the user of the run
};

// Describes data, or what a plan takes for them if they are not here. Throws Error saying what to do: data
// that are not there, another image size, more classes than --num-classes, a model that takes captions and
// samples without them or with those of another encoder, an encoder that is neither here nor known.
DataDescription describe(const DataSource& source, const DataAsks& asks);

// Describes the samples to validate on beside those that are trained on, `like`, with its captions' encoder.
// Whether the same encoders made both only loaded ones tell. Throws Error saying what to do: synthetic data,
// nothing there, another image size, other classes, no captions, pictures without an autoencoder.
DataDescription describe_held_out(const DataDescription& like, const ValidationOptions& validation);

}  // namespace kiln
