// --data: a feature store, images encoded on the way, or synthetic latents, checked against the model's
// needs.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "data/images/image_dataset.h"
#include "data/loader/batches.h"
#include "models/autoencoders/autoencoder.h"
#include "sample/run_folder.h"
#include "train/setup.h"

namespace kiln {

using BatchMaker = std::function<std::unique_ptr<BatchSource>(const BatchOptions&)>;

struct TrainingData {
  DataShape shape{};
  std::vector<std::string> class_names{};
  RunInfo::AutoencoderInfo autoencoder{};
  // Names the samples' content: a run resumes on the same one only.
  std::string identity{};
  BatchMaker batches{};
  std::function<std::string(int64_t id)> sample_name{};
  bool encodes_images = false;  // batches are encoded on the device when they are asked for
  // Decodes sample grids; null: none was given, or latents are pixels.
  std::shared_ptr<const Autoencoder> decoder{};
};

// The autoencoder that a run on a store loads to decode its sample grids: the one that is given, else for
// grids the store's own where it still lies; "" = none.
std::string decoder_path(const TrainOptions& options, const StoreInfo& store);

// Images that are encoded, on the device, when a batch of them is asked for.
struct EncodedImages {
  std::shared_ptr<const ImageDataset> images;
  std::string identity;  // names their content and what encodes them
  BatchMaker batches;
};
// Throws Error: no images at `path`, or --image-size does not fit the autoencoder.
EncodedImages encode_images(const TrainOptions& options, const std::string& path,
                            std::shared_ptr<const Autoencoder> autoencoder, at::Device device);

// Names the content of a store.
std::string store_identity(const FeatureStore& store);

// Throws Error saying what to do: image size, class count or autoencoder of a store that do not fit the
// options.
TrainingData open_training_data(const TrainOptions& options, at::Device device, at::ScalarType compute_dtype);

}  // namespace kiln
