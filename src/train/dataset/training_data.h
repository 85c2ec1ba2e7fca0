// The data that a run trains on, opened (a feature store, images encoded during training, or synthetic
// latents), with what encodes and decodes them.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "data/loader/batches.h"
#include "models/autoencoders/autoencoder.h"
#include "models/model.h"
#include "models/model_record.h"
#include "train/dataset/data_description.h"

namespace kiln {

using BatchMaker = std::function<std::unique_ptr<BatchSource>(const BatchOptions&)>;

// What `captions` describe can be encoded: their encoder is loaded.
struct TrainingData : DataDescription {
  ModelRecord::AutoencoderInfo autoencoder_info{};
  // Names the samples' content. A run resumes only on the same content.
  std::string identity{};
  // Returns the identity that an earlier version gave the same pictures; "" if it would have had others. Null
  // for other data.
  std::function<std::string()> earlier_identity{};
  BatchMaker batches{};
  std::function<std::string(int64_t id)> sample_name{};
  std::vector<SampleSource> sources{};  // where samples come from, if there are several; empty: a single one
  bool encodes = false;  // pictures or captions are encoded on the device when a batch is asked for
  // Decodes sample grids. Null: no decoder was given, or latents are pixels.
  std::shared_ptr<const Autoencoder> decoder{};
};

// Returns the features of a caption, (rows, D), in the mapped file. They must not be written to.
at::Tensor stored_rows(const TextStore& store, int64_t entry);

// Sets a fresh model's learned null rows to the features of the empty caption, as PixArt's and Sana's
// trainers do. So a dropped caption means what an empty prompt means to others who load the weights. Rows
// beyond those of the empty caption repeat its last row. Does nothing if the model has no such rows or
// `has_weights`. Throws Error if neither the model nor the store has a stand-in for a dropped caption.
void fill_null_text(const TextStore& store, const Denoiser& denoiser, bool has_weights);
// Returns what readers of a run's weights must know of its captions' encoder.
ModelRecord::TextInfo text_info(const TextStore& store);

// Opens data as they were described and loads their encoders. Throws Error for an autoencoder or captions
// that are not those of a store.
TrainingData open_training_data(DataDescription described, const TrainOptions& options, at::Device device,
                                at::ScalarType compute_dtype);

// The samples to validate on.
struct ValidationData {
  std::vector<int64_t> samples_of_lane{};  // one lane for each shape
  std::string identity{};                  // names the samples' content
  BatchMaker batches{};
  Pictures pictures{};  // those that are encoded and are none of --data; null if there are none
};

// Opens the samples to validate on beside those that are trained on, `data`, with its encoders. Throws Error
// as describe_held_out() does, and for a store of another autoencoder or text encoder than those of `data`.
ValidationData open_validation_data(const TrainOptions& options, const TrainingData& data, at::Device device);

}  // namespace kiln
