#include "train/training_data.h"

#include <algorithm>
#include <filesystem>

#include "core/aten.h"
#include "core/error.h"
#include "core/tensors.h"
#include "data/text_store/caption_table.h"
#include "train/encoding/encoded_captions.h"
#include "train/encoding/pictures.h"

namespace kiln {

namespace fs = std::filesystem;

namespace {

ModelRecord::AutoencoderInfo describe(const Autoencoder& autoencoder, const std::string& path) {
  return {.name = autoencoder.name,
          .path = path == "pixels" ? "" : fs::absolute(path).string(),
          .fingerprint = autoencoder.fingerprint,
          .scaling_factor = autoencoder.scaling_factor,
          .shift_factor = autoencoder.shift_factor};
}

TrainingData open_synthetic(const TrainOptions& options) {
  TrainingData data;
  const bool pixels = options.data.in_pixels();
  data.shape = synthetic_shape(options);
  data.autoencoder = {.name = pixels ? "pixels" : ""};  // no autoencoder made the latents
  data.identity = "synthetic";
  data.batches = [data](const BatchOptions& batch_options) {
    return synthetic_batches(data.shape, batch_options);
  };
  data.sample_name = [](int64_t id) { return fmt::format("{}", id); };
  return data;
}

void check_classes(const TrainOptions& options, const std::string& who, int64_t num_classes) {
  if (options.model.num_classes > 0 && options.model.num_classes < num_classes)
    fail("train", "--num-classes {} is less than the {} classes of {}: leave it out or give at least {}",
         options.model.num_classes, num_classes, who, num_classes);
}

void load_decoder(const TrainOptions& options, const DataDescription& described, at::Device device,
                  at::ScalarType compute_dtype, TrainingData& data) {
  if (!described.autoencoder) return;
  const StoreInfo& info = described.info;
  const std::string& path = described.autoencoder->path;
  data.decoder = load_autoencoder(path, device, compute_dtype);
  const bool is_known = !info.autoencoder_fingerprint.empty();  // unknown for an import
  if (is_known && data.decoder->fingerprint != info.autoencoder_fingerprint)
    fail("train",
         "the store {} was made by another autoencoder ({} {}) than {} ({} {}): give --autoencoder with the "
         "one that made it{}",
         options.data.path, info.autoencoder, info.autoencoder_fingerprint, path, data.decoder->name,
         data.decoder->fingerprint, options.data.autoencoder.empty() ? "" : ", or extract again");
  data.autoencoder.path = fs::absolute(path).string();
}

}  // namespace

void check_text_samples(const std::vector<std::string>& text_folders, const FeatureStore& store) {
  int64_t first = 0;
  for (const std::string& folder : text_folders) {
    const TextStoreInfo info = read_text_store_info(folder);
    const auto name_of = [&](int64_t sample) { return store.sample_name(first + sample); };
    if (!info.samples_xxh3.empty() && info.samples_xxh3 != xxh3_of_names(info.num_samples, name_of))
      fail("train",
           "{} has captions of other samples than its features: remove it and extract the text again",
           folder);
    first += info.num_samples;
  }
}

namespace {

// Returns a note about what a store of an earlier version has no checksums of; nothing otherwise.
std::vector<std::string> unchecked_notes(const std::string& path, const StoreInfo& info,
                                         const TextStore* text) {
  const bool has_all = std::ranges::none_of(
      info.shards, [](const StoreInfo::Shard& shard) { return shard.columns_xxh3.empty(); });
  const bool has_text = !text || !text->info().columns_xxh3.empty();
  if (has_all && has_text) return {};
  return {fmt::format(
      "the store {} is of an earlier version, without checksums of {}{}{}: check it with kiln store verify",
      path, has_all ? "" : "labels, names and shards' places", has_all || has_text ? "" : " or of ",
      has_text ? "" : "single captions' features")};
}

TrainingData open_store(const StoredData& stored, const TrainOptions& options, at::Device device,
                        at::ScalarType compute_dtype) {
  const std::shared_ptr<FeatureStore> store = open_sources(stored.stores());
  const DataDescription described = describe(stored, asks_of(options));
  const StoreInfo& info = store->info();
  if (store->size() == 0) fail("train", "the store {} is empty: run kiln extract", options.data.path);
  TrainingData data;
  data.shape = described.shape;
  data.text = described.text;
  data.class_names = described.class_names;
  data.autoencoder = {.name = info.autoencoder,
                      .path = info.autoencoder_path,
                      .fingerprint = info.autoencoder_fingerprint,
                      .scaling_factor = info.scaling_factor,
                      .shift_factor = info.shift_factor};
  load_decoder(options, described, device, compute_dtype, data);
  check_text_samples(described.text_folders, *store);
  data.notes = unchecked_notes(options.data.path, info, data.text.get());
  data.identity = identity_of(stored, described.text_folders);
  data.batches = [store, text = data.text,
                  lanes = split_of(options.validation.share, *store,
                                   Split::kTraining)](BatchOptions batch_options) {
    batch_options.lanes = lanes;
    return store_batches(store, batch_options, text);
  };
  data.sources = store->sources();
  data.sample_name = [store](int64_t id) { return store->sample_name(id); };
  return data;
}

void add_captions(const TrainOptions& options, const ImageDataset& images, const ConditioningShape& model,
                  at::Device device, at::ScalarType compute_dtype, bool encodes, TrainingData& data) {
  const auto opened = open_captions(options.data, images, options.model.name, model, compute_dtype);
  const SampledText sampled = sampled_shape(*opened);
  data.shape.text = sampled.shape;
  data.notes = caption_notes(*opened, sampled.cut_share);
  data.captions = load_captions(*opened, captions_at_once(options), device, compute_dtype,
                                encodes ? EncoderUse::kEncode : EncoderUse::kIds);
  data.text = data.captions;
  if (const CaptionEncoder& encoder = *data.captions->encoder(); encoder.is_streamed())
    data.notes.push_back(fmt::format("{}: in every step", encoder.streaming_text(data.captions->batch())));
}

// Opens pictures that are encoded during training.
TrainingData open_images(const TrainOptions& options, at::Device device, at::ScalarType compute_dtype,
                         bool encodes) {
  const std::shared_ptr<const Autoencoder> autoencoder =
      load_autoencoder(options.data.autoencoder, device, compute_dtype);
  TrainingData data;
  data.pictures = open_pictures(options.data, options.data.path, autoencoder->downsample);
  const std::shared_ptr<const RunPictures> images = data.pictures.images;
  data.shape.channels = autoencoder->latent_channels;
  data.shape.lanes = data.pictures.lanes->latent_lanes();
  data.shape.has_image_size = data.pictures.lanes->has_buckets();
  data.class_names = images->class_names();
  const int64_t num_classes = static_cast<int64_t>(data.class_names.size());
  check_classes(options, "the images " + options.data.path, num_classes);
  data.shape.num_classes = num_classes > 0 ? std::max(num_classes, options.model.num_classes) : 0;
  const ConditioningShape conditioning = asks_of(options).conditioning(data.shape);
  if (!conditioning.takes_labels()) data.shape.num_classes = 0;
  if (conditioning.takes_text())
    add_captions(options, *images, conditioning, device, compute_dtype, encodes, data);
  else if (!options.data.text_encoder.empty())
    data.notes.push_back(
        fmt::format("--text-encoder has no effect: {} takes no captions", options.model.name));
  const EncodedImages encoded =
      encode_images(options, data.pictures, autoencoder, data.captions, device, Split::kTraining);
  data.autoencoder = describe(*autoencoder, options.data.autoencoder);
  const bool are_pixels = autoencoder->name == "pixels";
  data.encodes = !are_pixels || data.captions;
  if (!are_pixels) data.decoder = autoencoder;
  data.identity = encoded.identity;
  data.earlier_identity = encoded.earlier_identity;
  data.batches = encoded.batches;
  data.sample_name = [images](int64_t id) { return images->records().at(static_cast<size_t>(id)).name; };
  return data;
}

}  // namespace

at::Tensor stored_rows(const TextStore& store, int64_t entry) {
  return at::from_blob(const_cast<std::byte*>(store.rows(entry).data()),
                       {store.num_rows(entry), store.info().width},
                       at::TensorOptions().dtype(to_scalar_type(store.info().dtype)));
}

void fill_null_text(const TextStore& store, const Denoiser& denoiser, bool has_weights) {
  const bool has_empty_caption = store.num_rows(TextStore::kNullEntry) > 0;
  if (!denoiser.null_text() && !has_empty_caption)
    fail("train",
         "the text store has no features of the empty caption, which a dropped caption becomes: import it "
         "with --text-encoder DIR");
  if (!denoiser.null_text() || has_weights || !has_empty_caption) return;
  const at::Tensor rows = stored_rows(store, TextStore::kNullEntry);
  const at::Tensor places = at::arange(denoiser.null_text()->value.size(0)).clamp_max(rows.size(0) - 1);
  denoiser.null_text()->value.copy_(rows.index_select(0, places));
}

ModelRecord::TextInfo text_info(const TextStore& store) {
  const TextStoreInfo& info = store.info();
  return {.encoder = info.encoder,
          .encoder_path = info.encoder_path,
          .encoder_fingerprint = info.encoder_fingerprint,
          .tokenizer_fingerprint = info.tokenizer_fingerprint,
          .max_tokens = info.max_tokens,
          .prefix = info.prefix,
          .suffix = info.suffix,
          .instruction = info.instruction,
          .dtype = info.dtype};
}

EncodedImages encode_images(const TrainOptions& options, const Pictures& pictures,
                            const std::shared_ptr<const Autoencoder>& autoencoder,
                            const std::shared_ptr<const EncodedText>& text, at::Device device, Split split) {
  const auto identity = [=, buckets = options.data.buckets](const std::string& images,
                                                            const std::string& lanes,
                                                            const std::string& captions) {
    return fmt::format("{}, {} {}{}{}", images, autoencoder->name, autoencoder->fingerprint,
                       pictures.lanes->has_buckets() ? fmt::format(", in buckets {} {}", buckets, lanes) : "",
                       captions);
  };
  return {.identity = identity(pictures.images->identity(), pictures.lanes->fingerprint(),
                               text ? identity_of(text->info()) : ""),
          .earlier_identity = [=, path = options.data.path]() -> std::string {
            const RunPictures& images = *pictures.images;
            const size_t num_pictures = images.all().records().size();
            // Without buckets the samples were all pictures, and the first broken one ended the run.
            if (!pictures.lanes->has_buckets() && images.records().size() != num_pictures) return "";
            std::string captions;
            if (text) {
              TextStoreInfo info = text->info();
              info.captions_fingerprint = captions_fingerprint(images.all(), path, text->options().captions);
              captions = identity_of(info);
            }
            return identity(
                fmt::format("{} images {}", num_pictures, dataset_fingerprint(images.all())),
                pictures.lanes->fingerprint([&](int64_t picture) { return images.index_in_all(picture); }),
                captions);
          },
          .batches =
              [=, at_once = options.micro_batch,
               lanes = split_of(options.validation.share, pictures, split)](BatchOptions batch_options) {
                batch_options.lanes = lanes;
                return image_batches(pictures, autoencoder, device, batch_options, at_once, text);
              }};
}

TrainingData open_training_data(const TrainOptions& options, at::Device device, at::ScalarType compute_dtype,
                                bool encodes) {
  const DataSource source = source_of(options.data);
  require_here(source);
  if (std::holds_alternative<SyntheticData>(source)) return open_synthetic(options);
  if (const auto* stored = std::get_if<StoredData>(&source))
    return open_store(*stored, options, device, compute_dtype);
  return open_images(options, device, compute_dtype, encodes);
}

}  // namespace kiln
