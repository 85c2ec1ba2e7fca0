#include "plan/planned_data.h"

#include <algorithm>
#include <filesystem>

#include "core/error.h"
#include "data/feature_store.h"
#include "data/image_dataset.h"
#include "extract/image_batches.h"
#include "plan/phases.h"
#include "train/training_data.h"

namespace kiln {

namespace fs = std::filesystem;

namespace {

bool is_synthetic(const TrainOptions& options) { return options.data.empty() || options.data == "synthetic"; }

// Of images that are encoded.
DataShape latent_shape(const TrainOptions& options) {
  if (!encodes_images(options) || !fs::exists(options.autoencoder)) return synthetic_shape(options);
  const AutoencoderKl autoencoder(read_autoencoder_kl_config(options.autoencoder), {.device = at::kMeta});
  check_image_size(autoencoder, options.image_size);
  const int64_t side = options.image_size / autoencoder.downsample;
  return {.channels = autoencoder.latent_channels, .height = side, .width = side};
}

int64_t num_classes_of(size_t names, const TrainOptions& options) {
  return names > 0 ? std::max(static_cast<int64_t>(names), options.num_classes) : 0;
}

DataShape store_shape(const TrainOptions& options) {
  const StoreInfo info = read_store_info(options.data);
  if (info.image_size != options.image_size)
    fail("plan", "--image-size {} does not fit the store {} of {}-pixel images: give --image-size {}",
         options.image_size, options.data, info.image_size, info.image_size);
  return {.channels = info.channels,
          .height = info.height,
          .width = info.width,
          .num_classes = num_classes_of(info.class_names.size(), options)};
}

}  // namespace

bool is_store(const TrainOptions& options) { return fs::exists(fs::path(options.data) / "store.json"); }

bool encodes_images(const TrainOptions& options) {
  return !is_synthetic(options) && !is_store(options) && options.autoencoder != "pixels";
}

bool encodes_validation_images(const TrainOptions& options) {
  const fs::path path = options.validation_data;
  return fs::exists(path) && !fs::exists(path / "store.json") && options.autoencoder != "pixels";
}

DataShape planned_shape(const TrainOptions& options) {
  if (is_synthetic(options)) return synthetic_shape(options);
  if (is_store(options)) return store_shape(options);
  if (!fs::exists(options.data))
    fail("plan",
         "--data {} does not exist: give a store made by kiln extract, images with --autoencoder, or "
         "'synthetic'",
         options.data);
  if (options.autoencoder.empty())
    fail("plan",
         "--data {} is not a feature store: run kiln extract, or give --autoencoder PATH (or pixels) to "
         "encode while training",
         options.data);
  DataShape shape = latent_shape(options);
  shape.num_classes = num_classes_of(ImageDataset::open(options.data)->class_names().size(), options);
  return shape;
}

std::optional<PlannedAutoencoder> planned_autoencoder(const TrainOptions& options, const DataShape& data) {
  const std::string path =
      is_store(options) ? decoder_path(options, read_store_info(options.data)) : options.autoencoder;
  if (path.empty() || (path == "pixels" && !is_store(options))) return std::nullopt;
  if (!fs::exists(path)) return PlannedAutoencoder{.config = {.latent_channels = data.channels}};
  return PlannedAutoencoder{.config = read_autoencoder_kl_config(path), .is_here = true};
}

int64_t autoencoder_bytes(const TrainOptions& options, const DataShape& data, DryRunDevice device) {
  const std::optional<PlannedAutoencoder> autoencoder = planned_autoencoder(options, data);
  if (!autoencoder) return 0;
  return left_bytes(trace_autoencoder(autoencoder->config, options, data, device, /*world_size=*/1).load);
}

}  // namespace kiln
