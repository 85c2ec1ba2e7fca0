#include "train/dataset/training_data.h"

#include <algorithm>
#include <filesystem>

#include "core/aten.h"
#include "core/error.h"
#include "core/tensors.h"
#include "data/text_store/caption_table.h"
#include "train/dataset/store_data.h"
#include "train/encoding/encoded_captions.h"

namespace kiln {

namespace fs = std::filesystem;

namespace {

ModelRecord::AutoencoderInfo info_of(const Autoencoder& autoencoder, const std::string& path) {
  return {.name = autoencoder.name,
          .path = path == "pixels" ? "" : fs::absolute(path).string(),
          .fingerprint = autoencoder.fingerprint,
          .scaling_factor = autoencoder.scaling_factor,
          .shift_factor = autoencoder.shift_factor};
}

void load_decoder(at::Device device, at::ScalarType compute_dtype, TrainingData& data) {
  const std::string& path = data.autoencoder->path;
  data.decoder = load_autoencoder(path, device, compute_dtype);
  const DataOptions& options = std::get<StoredData>(data.source).options;
  const bool is_known = !data.info.autoencoder_fingerprint.empty();  // unknown for an import
  if (is_known && data.decoder->fingerprint != data.info.autoencoder_fingerprint)
    fail("train",
         "the store {} was made by another autoencoder ({} {}) than {} ({} {}): give --autoencoder with the "
         "one that made it{}",
         options.path, data.info.autoencoder, data.info.autoencoder_fingerprint, path, data.decoder->name,
         data.decoder->fingerprint, options.autoencoder.empty() ? "" : ", or extract again");
  data.autoencoder_info.path = fs::absolute(path).string();
}

// Throws Error if a text store has captions of other samples than the part of the store that it lies beside.
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

BatchMaker batches_of_store(const std::shared_ptr<FeatureStore>& store,
                            const std::shared_ptr<const TextStore>& text, std::vector<SampleLane> lanes) {
  return [store, text, lanes = std::move(lanes)](BatchOptions batch_options) {
    batch_options.lanes = lanes;
    return store_batches(store, batch_options, text);
  };
}

// Images that are encoded on the device when a batch of them is asked for.
struct EncodedImages {
  std::string identity;                           // names the images and their encoders
  std::function<std::string()> earlier_identity;  // as TrainingData's
  BatchMaker batches;
};
// `text` holds their captions, or is null. `lanes`: the samples that are taken; empty: all.
EncodedImages encode_images(const TrainOptions& options, const Pictures& pictures,
                            const std::shared_ptr<const Autoencoder>& autoencoder,
                            const std::shared_ptr<const EncodedText>& text, at::Device device,
                            const std::vector<SampleLane>& lanes) {
  const auto identity = [=, buckets = options.data.buckets](const std::string& images,
                                                            const std::string& in_buckets,
                                                            const std::string& captions) {
    return fmt::format(
        "{}, {} {}{}{}", images, autoencoder->name, autoencoder->fingerprint,
        pictures.lanes->has_buckets() ? fmt::format(", in buckets {} {}", buckets, in_buckets) : "",
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
              info.captions_fingerprint = captions_fingerprint(images.all(), path, text->options());
              captions = identity_of(info);
            }
            return identity(
                fmt::format("{} images {}", num_pictures, dataset_fingerprint(images.all())),
                pictures.lanes->fingerprint([&](int64_t picture) { return images.index_in_all(picture); }),
                captions);
          },
          .batches =
              [=, at_once = options.micro_batch](BatchOptions batch_options) {
                batch_options.lanes = lanes;
                return image_batches(pictures, autoencoder, device, batch_options, at_once, text);
              }};
}

void open_source(const SyntheticData& source, const TrainOptions&, at::Device, at::ScalarType,
                 TrainingData& data) {
  data.autoencoder_info = {.name = source.options.in_pixels() ? "pixels" : ""};  // none made the latents
  data.identity = "synthetic";
  data.batches = [shape = data.shape](const BatchOptions& batch_options) {
    return synthetic_batches(shape, batch_options);
  };
  data.sample_name = [](int64_t id) { return fmt::format("{}", id); };
}

void open_source(const StoredData& source, const TrainOptions& options, at::Device device,
                 at::ScalarType compute_dtype, TrainingData& data) {
  const std::shared_ptr<FeatureStore> store = open_sources(source.stores());
  const StoreInfo& info = store->info();
  if (store->size() == 0) fail("train", "the store {} is empty: run kiln extract", source.options.path);
  data.autoencoder_info = {.name = info.autoencoder,
                           .path = info.autoencoder_path,
                           .fingerprint = info.autoencoder_fingerprint,
                           .scaling_factor = info.scaling_factor,
                           .shift_factor = info.shift_factor};
  if (data.autoencoder) load_decoder(device, compute_dtype, data);
  check_text_samples(data.text_folders, *store);
  data.notes = unchecked_notes(source.options.path, info, data.text.get());
  data.identity = identity_of(source, data.text_folders);
  data.batches =
      batches_of_store(store, data.text, split_of(options.validation.share, *store, Split::kTraining));
  data.sources = store->sources();
  data.sample_name = [store](int64_t id) { return store->sample_name(id); };
}

void open_source(const PictureData& source, const TrainOptions& options, at::Device device,
                 at::ScalarType compute_dtype, TrainingData& data) {
  const std::string& path = source.options.autoencoder;
  const std::shared_ptr<const Autoencoder> autoencoder = load_autoencoder(path, device, compute_dtype);
  if (data.captions) {
    data.captions = load_captions(*data.captions, captions_at_once(options), device, compute_dtype);
    data.text = data.captions;
    if (const CaptionEncoder& encoder = *data.captions->encoder(); encoder.is_streamed())
      data.notes.push_back(fmt::format("{}: in every step", encoder.streaming_text(data.captions->batch())));
  }
  EncodedImages encoded = encode_images(options, data.pictures, autoencoder, data.captions, device,
                                        split_of(options.validation.share, data.pictures, Split::kTraining));
  data.autoencoder_info = info_of(*autoencoder, path);
  data.encodes = source.are_encoded() || data.captions;
  if (source.are_encoded()) data.decoder = autoencoder;
  data.identity = std::move(encoded.identity);
  data.earlier_identity = std::move(encoded.earlier_identity);
  data.batches = std::move(encoded.batches);
  data.sample_name = [images = data.pictures.images](int64_t id) {
    return images->records().at(static_cast<size_t>(id)).name;
  };
}

// Throws Error unless the autoencoder of --data made the latents.
void check_latents(const TrainOptions& options, const StoreInfo& info, const TrainingData& data) {
  const ModelRecord::AutoencoderInfo& made_by = data.autoencoder_info;
  if (info.autoencoder == made_by.name && info.autoencoder_fingerprint == made_by.fingerprint &&
      info.channels == data.shape.channels && (info.lanes == data.shape.lanes || data.shape.lanes.size() > 1))
    return;
  fail("train",
       "--validation-data {} was made by another autoencoder ({} {}, {} x {} latents) than --data ({} "
       "{}, {} x {}): extract it again with the autoencoder of --data",
       options.validation.data, info.autoencoder, info.autoencoder_fingerprint, info.channels,
       lanes_text(info.lanes), made_by.name, made_by.fingerprint, data.shape.channels,
       lanes_text(data.shape.lanes));
}

// Throws Error unless the encoder of --data's captions made the captions.
void check_captions(const TrainOptions& options, const TextStoreInfo& ours, const TextStoreInfo& theirs) {
  if (ours.encoder_fingerprint != theirs.encoder_fingerprint ||
      ours.tokenizer_fingerprint != theirs.tokenizer_fingerprint || ours.max_tokens != theirs.max_tokens ||
      ours.instruction != theirs.instruction)
    fail("train",
         "the captions of --validation-data {} were made by another text encoder or after another "
         "instruction ({} {}, up to {} tokens) than those of --data ({} {}, up to {}): extract them again "
         "with the settings of --data",
         options.validation.data, ours.encoder, ours.encoder_fingerprint, ours.max_tokens, theirs.encoder,
         theirs.encoder_fingerprint, theirs.max_tokens);
}

std::string held_out_identity(const TrainOptions& options, const std::string& data) {
  return options.validation.share > 0 ? fmt::format("{:g} of {}", options.validation.share, data) : data;
}

std::vector<int64_t> sizes_of(const std::vector<SampleLane>& lanes) {
  std::vector<int64_t> sizes;
  sizes.reserve(lanes.size());
  for (const SampleLane& lane : lanes) sizes.push_back(lane.size());
  return sizes;
}

ValidationData open_held_out(const StoredData& source, const TrainOptions& options, const TrainingData& data,
                             const DataDescription& held_out) {
  check_latents(options, held_out.info, data);
  if (held_out.text) check_captions(options, held_out.text->info(), data.text->info());
  const std::shared_ptr<FeatureStore> store = open_sources(source.stores());
  check_text_samples(held_out.text_folders, *store);
  std::vector<SampleLane> lanes = split_of(options.validation.share, *store, Split::kHeldOut);
  if (lanes.empty()) lanes = store->sample_lanes();
  return {.samples_of_lane = sizes_of(lanes),
          .identity = held_out_identity(options, identity_of(source, held_out.text_folders)),
          .batches = batches_of_store(store, held_out.text, lanes)};
}

ValidationData open_held_out_pictures(const TrainOptions& options, const TrainingData& data,
                                      const DataDescription& held_out, at::Device device) {
  std::shared_ptr<const Autoencoder> autoencoder = data.decoder;
  if (!autoencoder) autoencoder = load_autoencoder("pixels", device, at::kFloat);
  const Pictures& pictures = held_out.pictures;
  const std::vector<SampleLane> lanes = split_of(options.validation.share, pictures, Split::kHeldOut);
  EncodedImages encoded = encode_images(options, pictures, autoencoder, held_out.captions, device, lanes);
  return {.samples_of_lane = sizes_of(lanes.empty() ? pictures.lanes->sample_lanes() : lanes),
          .identity = held_out_identity(options, encoded.identity),
          .batches = std::move(encoded.batches),
          .pictures = options.validation.share > 0 ? Pictures() : pictures};
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

TrainingData open_training_data(DataDescription described, const TrainOptions& options, at::Device device,
                                at::ScalarType compute_dtype) {
  TrainingData data{std::move(described)};
  std::visit([&](const auto& source) { open_source(source, options, device, compute_dtype, data); },
             data.source);
  return data;
}

ValidationData open_validation_data(const TrainOptions& options, const TrainingData& data,
                                    at::Device device) {
  const DataDescription held_out = describe_held_out(data, options.validation);
  const auto* stored = std::get_if<StoredData>(&held_out.source);
  return stored ? open_held_out(*stored, options, data, held_out)
                : open_held_out_pictures(options, data, held_out, device);
}

}  // namespace kiln
