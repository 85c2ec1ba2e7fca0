// The data that a run trains on, opened (a feature store, images encoded during training, or synthetic
// latents), with what encodes and decodes them.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "data/loader/batches.h"
#include "models/autoencoders/autoencoder.h"
#include "models/model_record.h"
#include "train/dataset/store_data.h"
#include "train/setup.h"

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

// Throws Error if a text store has captions of other samples than the part of the store that it lies beside.
void check_text_samples(const std::vector<std::string>& text_folders, const FeatureStore& store);

// Images that are encoded on the device when a batch of them is asked for.
struct EncodedImages {
  std::string identity;                           // names the images and their encoders
  std::function<std::string()> earlier_identity;  // as above
  BatchMaker batches;
};
// `text` holds their captions, or is null. `split` matters if --validation-share divides the images.
EncodedImages encode_images(const TrainOptions& options, const Pictures& pictures,
                            const std::shared_ptr<const Autoencoder>& autoencoder,
                            const std::shared_ptr<const EncodedText>& text, at::Device device, Split split);

// Describes the data of the options, opens them and loads their encoders. Throws Error as describe() does,
// and for an autoencoder or captions that are not those of a store.
TrainingData open_training_data(const TrainOptions& options, at::Device device, at::ScalarType compute_dtype);

}  // namespace kiln
