#include "train/dataset/data_description.h"

#include <algorithm>
#include <filesystem>

#include "core/error.h"
#include "core/units.h"
#include "data/loader/batches.h"
#include "data/text_store/text_store.h"
#include "models/autoencoders/autoencoder.h"
#include "models/autoencoders/autoencoder_kl.h"
#include "train/dataset/store_data.h"
#include "train/encoding/encoded_captions.h"
#include "train/encoding/pictures.h"

namespace kiln {

namespace fs = std::filesystem;

namespace {

constexpr int64_t kSyntheticClasses = 1000;  // ImageNet's, as the published models have
constexpr PublishedLatents kPixels = {.channels = 3, .downsample = 1};

int64_t num_classes_of(const std::vector<std::string>& names, const DataAsks& asks, const std::string& who) {
  const auto num_classes = static_cast<int64_t>(names.size());
  if (asks.num_classes > 0 && asks.num_classes < num_classes)
    fail("train", "--num-classes {} is less than the {} classes of {}: leave it out or give at least {}",
         asks.num_classes, num_classes, who, num_classes);
  return num_classes > 0 ? std::max(num_classes, asks.num_classes) : 0;
}

// Returns what the model is told. Takes labels off the shape if it takes none.
ConditioningShape told_of(const DataAsks& asks, DataShape& shape) {
  ConditioningShape told = asks.conditioning(shape);
  if (!told.takes_labels()) shape.num_classes = 0;
  return told;
}

// Returns the autoencoder at `path`, or what it may be if nothing is there, for latents of this shape.
AutoencoderOutline outline_of(const std::string& path, int64_t image_size, const DataShape& shape) {
  if (fs::exists(path)) return {.path = path, .config = read_autoencoder_config(path)};
  PublishedAutoencoder published = published_autoencoder(image_size / shape.side(), shape.channels);
  return {.path = path, .config = std::move(published.config), .assumed = std::move(published.whose)};
}

TextEncoderOutline outline_of(const DataOptions& options, const DataAsks& asks, const TextShape& text) {
  TextEncoderOutline outline{.folder = options.text_encoder};
  if (!options.captions.memory.empty()) outline.room_bytes = byte_size(options.captions.memory);
  if (fs::exists(outline.folder)) return outline;
  for (const PublishedTextEncoder& published : published_text_encoders()) {
    outline.assumed = &published;
    if (outline.build(asks.compute_dtype)->shape().width == text.width) return outline;
  }
  fail("plan",
       "--text-encoder {} is no folder, and no published one is known of {} channels: give its folder",
       outline.folder, text.width);
}

// --- random samples

// Returns the shape of latents that the model was published for, or of pixels, with all that it is told.
DataShape random_shape(const DataOptions& options, const DataAsks& asks) {
  const PublishedLatents latents = options.in_pixels() ? kPixels : asks.latents;
  if (options.image_size % latents.downsample != 0)
    fail("train", "--image-size must be a multiple of {}, got {}", latents.downsample, options.image_size);
  const int64_t side = options.image_size / latents.downsample;
  DataShape shape = {.channels = latents.channels,
                     .num_classes = asks.num_classes > 0 ? asks.num_classes : kSyntheticClasses,
                     .lanes = {{.height = side, .width = side}}};
  const ConditioningShape told = told_of(asks, shape);
  shape.has_image_size = told.takes_image_size;
  const auto max_rows = static_cast<double>(told.max_text_tokens);
  shape.text = {.width = told.text_width,
                .max_rows = told.max_text_tokens,
                .mean_rows = told.pads_text ? max_rows : (max_rows + 1) / 2,
                .is_padded = told.pads_text};
  return shape;
}

DataDescription described(const SyntheticData& data, const DataAsks& asks) {
  DataDescription made;
  made.shape = random_shape(data.options, asks);
  return made;
}

// --- stores

// Returns the path of the autoencoder that decodes what is drawn: the one that is given, else, if anything is
// drawn, the store's own if it still exists. "": none.
std::string decoder_path(const DataOptions& options, const DataAsks& asks, const StoreInfo& info) {
  if (info.autoencoder == "pixels") return "";
  if (!options.autoencoder.empty()) return options.autoencoder;
  std::error_code unreachable;  // another user's folder counts as missing
  return asks.draws && fs::exists(info.autoencoder_path, unreachable) ? info.autoencoder_path : "";
}

// Begins to describe stores. `misfit` says that {0} holds images of {1} pixels and the run is of {2}.
DataDescription stores_of(const StoredData& data, const char* misfit) {
  DataDescription made;
  made.info = read_sources_info(data.stores());
  if (made.info.image_size != data.options.image_size)
    fail("train", fmt::runtime(misfit), data.options.path, made.info.image_size, data.options.image_size);
  made.class_names = made.info.class_names;
  return made;
}

DataDescription described(const StoredData& data, const DataAsks& asks) {
  const DataOptions& options = data.options;
  DataDescription made =
      stores_of(data,
                "--image-size {2} does not fit the store {0} of {1}-pixel images: train with "
                "--image-size {1} or extract again with --image-size {2}");
  made.shape = store_shape(made.info);
  made.shape.num_classes = num_classes_of(made.class_names, asks, "the store " + options.path);
  const ConditioningShape told = told_of(asks, made.shape);
  if (told.takes_text()) {
    made.text_folders = text_folders_of(data, asks.model, told.pads_text);
    made.text = open_texts(made.text_folders);
    made.shape.text = text_shape(*made.text);
  } else if (!options.text.empty()) {
    fail("train", "--text {}: {} takes no captions, leave it out", options.text, asks.model);
  }
  if (made.info.autoencoder == "pixels" && !options.autoencoder.empty() && !options.in_pixels())
    fail("train", "the store {} holds pixels: leave --autoencoder out", options.path);
  if (const std::string path = decoder_path(options, asks, made.info); !path.empty())
    made.autoencoder = outline_of(path, options.image_size, made.shape);
  return made;
}

// --- pictures

// Returns the latents that an autoencoder makes.
PublishedLatents latents_of(const std::string& autoencoder) {
  const auto outline = build_autoencoder(read_autoencoder_config(autoencoder), {.device = at::kMeta});
  return {.channels = outline->latent_channels, .downsample = outline->downsample};
}

PublishedLatents latents_of(const PictureData& data, const DataAsks& asks) {
  if (!data.are_encoded()) return kPixels;
  if (!fs::exists(data.options.autoencoder)) return asks.latents;
  const PublishedLatents latents = latents_of(data.options.autoencoder);
  check_image_size(latents.downsample, data.options.image_size);
  return latents;
}

// Describes the pictures' captions, if the model takes any.
void add_captions(const DataOptions& options, const ConditioningShape& told, DataDescription& made) {
  if (told.takes_text()) {
    made.captions =
        open_captions(options, *made.pictures.images, made.asks.model, told, made.asks.compute_dtype);
    made.text = made.captions;
    const SampledText sampled = sampled_shape(*made.captions);
    made.shape.text = sampled.shape;
    made.notes = caption_notes(*made.captions, sampled.cut_share);
  } else if (!options.text_encoder.empty()) {
    made.notes.push_back(fmt::format("--text-encoder has no effect: {} takes no captions", made.asks.model));
  }
}

DataDescription described(const PictureData& data, const DataAsks& asks) {
  const DataOptions& options = data.options;
  const PublishedLatents latents = latents_of(data, asks);
  DataDescription made{.asks = asks};
  if (options.path.empty()) {
    made.shape = random_shape(options, asks);
    made.shape.channels = latents.channels;
    made.shape.lanes = planned_lanes(options, latents.downsample);
  } else {
    made.pictures = open_pictures(options, options.path, latents.downsample);
    made.class_names = made.pictures.images->class_names();
    made.shape = {.channels = latents.channels,
                  .num_classes = num_classes_of(made.class_names, asks, "the images " + options.path),
                  .lanes = made.pictures.lanes->latent_lanes(),
                  .has_image_size = made.pictures.lanes->has_buckets()};
    add_captions(options, told_of(asks, made.shape), made);
  }
  if (data.are_encoded()) made.autoencoder = outline_of(options.autoencoder, options.image_size, made.shape);
  if (!options.text_encoder.empty() && made.shape.text.width > 0)
    made.text_encoder = outline_of(options, asks, made.shape.text);
  return made;
}

// --- samples that are held out

const DataOptions& options_in(const DataSource& source) {
  return std::visit([](const auto& data) -> const DataOptions& { return data.options; }, source);
}

void require_same_classes(const std::string& path, const std::vector<std::string>& names,
                          const std::vector<std::string>& trained) {
  if (names == trained) return;
  const size_t common = std::min(names.size(), trained.size());
  const auto differ =
      std::mismatch(names.begin(), names.begin() + static_cast<int64_t>(common), trained.begin());
  const auto name_at = [](const std::vector<std::string>& all, int64_t index) {
    return index < static_cast<int64_t>(all.size()) ? all[static_cast<size_t>(index)] : "none";
  };
  const int64_t index = differ.first - names.begin();
  fail("train",
       "--validation-data {} has {} classes, --data has {}; class {} is '{}', in --data '{}': make it "
       "from folders of the same names",
       path, names.size(), trained.size(), index, name_at(names, index), name_at(trained, index));
}

DataDescription held_out(const StoredData& data, const DataDescription& like) {
  DataDescription made = stores_of(data,
                                   "--validation-data {0} has {1}-pixel images, but --image-size is {2}: "
                                   "extract it again with --image-size {2}");
  require_same_classes(data.options.path, made.class_names, like.class_names);
  made.shape = like.shape;
  made.shape.lanes = made.info.lanes;
  if (!like.text) return made;
  made.text_folders = text_folders_of(data, like.asks.model, like.asks.conditioning(like.shape).pads_text);
  made.text = open_texts(made.text_folders);
  return made;
}

// Returns how many pixels make a latent of `like`, along a side.
int64_t downsample_of(const DataDescription& like, const ValidationOptions& validation) {
  if (like.autoencoder) return latents_of(like.autoencoder->path).downsample;
  if (std::holds_alternative<StoredData>(like.source) && like.info.autoencoder != "pixels")
    fail("train",
         "--validation-data {} is not a feature store: run kiln extract, or give --autoencoder with that of "
         "--data, to encode its images at every validation",
         validation.data);
  return 1;
}

DataDescription held_out(const PictureData& data, const DataDescription& like,
                         const ValidationOptions& validation) {
  const std::string& path = data.options.path;
  const int64_t downsample = downsample_of(like, validation);
  DataDescription made;
  made.pictures = like.pictures;
  made.captions = like.captions;
  if (validation.share == 0) {
    made.pictures = open_validation_pictures(data.options, like.pictures, downsample);
    if (like.captions) made.captions = captions_like(*like.captions, *made.pictures.images, path);
  }
  if (like.text && !like.captions)
    fail("train",
         "--validation-data {} are pictures, and the captions of --data {} lie in a store: run kiln extract "
         "on them too",
         path, options_in(like.source).path);
  made.text = made.captions;
  made.class_names = made.pictures.images->class_names();
  require_same_classes(path, made.class_names, like.class_names);
  made.shape = like.shape;
  made.shape.lanes = made.pictures.lanes->latent_lanes();
  made.autoencoder = like.autoencoder;
  return made;
}

}  // namespace

std::unique_ptr<TextEncoder> TextEncoderOutline::build(at::ScalarType dtype) const {
  return assumed ? outline_text_encoder(*assumed, dtype) : outline_text_encoder(folder, dtype);
}

DataDescription describe(const DataSource& source, const DataAsks& asks) {
  require_here(source);
  DataDescription made = std::visit([&](const auto& data) { return described(data, asks); }, source);
  made.source = source;
  made.asks = asks;
  return made;
}

DataDescription describe_held_out(const DataDescription& like, const ValidationOptions& validation) {
  if (std::holds_alternative<SyntheticData>(like.source))
    fail("train", "--validation-data has nothing in common with --data synthetic: leave it out");
  const DataOptions options = held_out_options(options_in(like.source), validation);
  const DataSource source = source_of(options);
  if (std::holds_alternative<SyntheticData>(source) || !is_here(options))
    fail("train", "--validation-data {} does not exist: give a store made by kiln extract, or images",
         options.path);
  const auto* stored = std::get_if<StoredData>(&source);
  DataDescription made =
      stored ? held_out(*stored, like) : held_out(std::get<PictureData>(source), like, validation);
  made.source = source;
  made.asks = like.asks;
  return made;
}

}  // namespace kiln
