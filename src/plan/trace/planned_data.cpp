#include "plan/trace/planned_data.h"

#include <algorithm>
#include <filesystem>

#include "core/error.h"
#include "core/units.h"
#include "data/loader/batches.h"
#include "data/store/feature_store.h"
#include "data/text_store/joined_text.h"
#include "models/autoencoders/autoencoder_dc.h"
#include "models/autoencoders/autoencoder_kl.h"
#include "models/family.h"
#include "train/encoding/encoded_captions.h"
#include "train/encoding/pictures.h"
#include "train/training_data.h"

namespace kiln {

namespace fs = std::filesystem;

namespace {

constexpr int64_t kSanaDownsample = 32;

// Returns the form of the latents that pictures are encoded to.
PublishedLatents latents_of(const TrainOptions& options) {
  if (encodes_images(options) && fs::exists(options.data.autoencoder)) {
    const auto autoencoder =
        build_autoencoder(read_autoencoder_config(options.data.autoencoder), {.device = at::kMeta});
    check_image_size(autoencoder->downsample, options.data.image_size);
    return {.channels = autoencoder->latent_channels, .downsample = autoencoder->downsample};
  }
  const DataShape told = synthetic_shape(options);
  return {.channels = told.channels, .downsample = options.data.image_size / told.side()};
}

DataShape stored_shape(const TrainOptions& options) {
  StoredSamples samples = describe_stores(options);
  if (!samples.text_folders.empty()) samples.shape.text = text_shape(*open_texts(samples.text_folders));
  return samples.shape;
}

int64_t num_classes_of(size_t names, const TrainOptions& options) {
  return names > 0 ? std::max(static_cast<int64_t>(names), options.model.num_classes) : 0;
}

}  // namespace

bool encodes_images(const TrainOptions& options) { return encodes_pictures(source_of(options.data)); }

bool encodes_validation_images(const TrainOptions& options) {
  const DataOptions held_out = held_out_options(options.data, options.validation);
  return (options.validation.share > 0 || is_here(held_out)) && encodes_pictures(source_of(held_out));
}

DataShape planned_shape(const TrainOptions& options) {
  const DataSource source = source_of(options.data);
  if (std::holds_alternative<SyntheticData>(source)) return synthetic_shape(options);
  if (std::holds_alternative<StoredData>(source)) return stored_shape(options);
  if (options.data.path.empty()) {
    const PublishedLatents latents = latents_of(options);
    DataShape shape = synthetic_shape(options);
    shape.channels = latents.channels;
    shape.lanes = planned_lanes(options.data, latents.downsample);
    return shape;
  }
  require_here(source);
  const PublishedLatents latents = latents_of(options);
  const Pictures pictures = open_pictures(options.data, options.data.path, latents.downsample);
  DataShape shape = {.channels = latents.channels,
                     .num_classes = num_classes_of(pictures.images->class_names().size(), options),
                     .lanes = pictures.lanes->latent_lanes(),
                     .has_image_size = pictures.lanes->has_buckets()};
  const ConditioningShape conditioning = conditioning_of(options, shape);
  if (!conditioning.takes_labels()) shape.num_classes = 0;
  if (conditioning.takes_text())
    shape.text = sampled_shape(*open_captions(options.data, *pictures.images, options.model.name,
                                              conditioning, options.compute.held_dtype()))
                     .shape;
  return shape;
}

std::optional<PlannedTextEncoder> planned_text_encoder(const TrainOptions& options, const DataShape& data) {
  const std::string& folder = options.data.text_encoder;
  if (folder.empty() || data.text.width == 0 || !reads_pictures(source_of(options.data))) return std::nullopt;
  const at::ScalarType dtype = options.compute.held_dtype();
  PlannedTextEncoder planned;
  if (!options.data.captions.memory.empty()) planned.room_bytes = byte_size(options.data.captions.memory);
  if (fs::exists(folder)) {
    planned.encoder = outline_text_encoder(folder, dtype);
    return planned;
  }
  for (const PublishedTextEncoder& published : published_text_encoders()) {
    std::unique_ptr<TextEncoder> encoder = outline_text_encoder(published, dtype);
    if (encoder->shape().width != data.text.width) continue;
    planned.assumed = published.name;
    planned.encoder = std::move(encoder);
    return planned;
  }
  fail("plan",
       "--text-encoder {} is no folder, and no published one is known of {} channels: give its folder",
       folder, data.text.width);
}

std::optional<PlannedAutoencoder> planned_autoencoder(const TrainOptions& options, const DataShape& data) {
  const bool is_stored = std::holds_alternative<StoredData>(source_of(options.data));
  const std::string path = is_stored ? decoder_path(options, read_store_info(options.data.path))
                                     : options.data.autoencoder;
  if (path.empty() || (path == "pixels" && !is_stored)) return std::nullopt;
  if (fs::exists(path)) return PlannedAutoencoder{.config = read_autoencoder_config(path)};
  if (options.data.image_size / data.side() >= kSanaDownsample)
    return PlannedAutoencoder{.config = sana_autoencoder_config(), .assumed = "Sana's DC-AE f32c32"};
  nlohmann::json config = sd_vae_config();
  config["latent_channels"] = data.channels;
  return PlannedAutoencoder{.config = std::move(config), .assumed = "KL-f8's"};
}

}  // namespace kiln
