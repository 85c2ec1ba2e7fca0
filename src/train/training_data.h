// --data: a feature store, images encoded on the way, or synthetic latents, checked against the model's
// needs.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "data/loader/batches.h"
#include "extract/encoded_text.h"
#include "extract/image_batches.h"
#include "models/autoencoders/autoencoder.h"
#include "sample/run_folder.h"
#include "train/setup.h"
#include "train/store_data.h"

namespace kiln {

using BatchMaker = std::function<std::unique_ptr<BatchSource>(const BatchOptions&)>;

struct TrainingData {
  DataShape shape{};
  std::vector<std::string> class_names{};
  RunInfo::AutoencoderInfo autoencoder{};
  // Names the samples' content: a run resumes on the same one only.
  std::string identity{};
  BatchMaker batches{};
  std::shared_ptr<const TextStore>
      text{};  // captions of the samples; null: the model takes none, or synthetic
  std::function<std::string(int64_t id)> sample_name{};
  std::vector<SampleSource> sources{};  // several that samples come from; empty: one
  Pictures pictures{};                  // that are encoded on the way; null: --data are none
  bool encodes = false;  // pictures or captions are encoded on the device when a batch is asked for
  std::shared_ptr<const EncodedText> captions{};  // `text`, where it is encoded so; null: it is not
  std::vector<std::string> notes{};               // that the user of the run should read
  // Decodes sample grids; null: none was given, or latents are pixels.
  std::shared_ptr<const Autoencoder> decoder{};
};

// The features of a caption, (rows, D) where they are mapped: they must not be written to.
at::Tensor stored_rows(const TextStore& store, int64_t entry);

// Sets a fresh model's learned null rows to the features of the empty caption, as PixArt's and Sana's
// trainers do, so that a dropped caption means what an empty prompt means to others who load the weights.
// Rows beyond those of the empty caption repeat its last. Does nothing where the model has no such rows, or
// where it `has_weights`. Throws Error where neither the model nor the store has what stands for a dropped
// caption.
void fill_null_text(const TextStore& store, const Denoiser& denoiser, bool has_weights);
// What the readers of a run's weights must know of its captions' encoder.
RunInfo::TextInfo text_info(const TextStore& store);

// The autoencoder that a run on a store loads to decode its sample grids: the one that is given, else for
// grids the store's own where it still lies; "" = none.
std::string decoder_path(const TrainOptions& options, const StoreInfo& store);

// Images that are encoded, on the device, when a batch of them is asked for.
struct EncodedImages {
  std::string identity;  // names their content and what encodes them
  BatchMaker batches;
};
// `text`: their captions, or null. `split`: where --validation-share divides them.
EncodedImages encode_images(const TrainOptions& options, const Pictures& pictures,
                            std::shared_ptr<const Autoencoder> autoencoder,
                            std::shared_ptr<const EncodedText> text, at::Device device, Split split);

// Throws Error saying what to do: image size, class count or autoencoder of a store that do not fit the
// options.
// Without `encodes` it describes the samples alone: no text encoder is loaded, batches must not be asked for.
TrainingData open_training_data(const TrainOptions& options, at::Device device, at::ScalarType compute_dtype,
                                bool encodes = true);

}  // namespace kiln
