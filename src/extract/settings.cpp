#include "extract/settings.h"

#include <algorithm>
#include <filesystem>

#include "core/error.h"
#include "core/tensors.h"
#include "parallel/machine.h"

namespace kiln {

ExtractSettings resolve(const ExtractOptions& options, int64_t local_rank, int64_t cpu_share) {
  if (options.flip != "none" && options.flip != "both")
    fail("extract", "--flip: expected none or both, got {}", options.flip);
  if (options.exif_orientation != "apply" && options.exif_orientation != "ignore")
    fail("extract", "--exif-orientation: expected apply or ignore, got {}", options.exif_orientation);
  if (options.bucket_min < 1)
    fail("extract", "--bucket-min: expected 1 or more pictures, got {}", options.bucket_min);
  if (options.bucket_min > 1 && options.buckets.empty())
    fail("extract", "--bucket-min {} has no effect without --buckets", options.bucket_min);
  if (options.batch < 0 || options.workers < 0 || options.shard_size < 1)
    fail("extract", "--batch, --workers and --shard-size: expected positive numbers, got {}, {} and {}",
         options.batch, options.workers, options.shard_size);
  constexpr int64_t kMostWorkers = 1024, kMostPictures = 1 << 20;
  if (options.workers > kMostWorkers || options.batch > kMostPictures)
    fail("extract", "--workers expects at most {} and --batch at most {}, got {} and {}", kMostWorkers,
         kMostPictures, options.workers, options.batch);
  ExtractSettings settings;
  settings.device = parse_device(options.device, local_rank);
  settings.compute_dtype = parse_compute_dtype(options.compute_dtype, "--compute-dtype");
  settings.num_flips = options.flip == "both" ? 2 : 1;
  settings.batch = options.batch;
  if (settings.batch == 0) settings.batch = settings.device.is_cuda() ? 32 : 8;
  const int cores = static_cast<int>(cpu_share);
  settings.num_workers = static_cast<int>(options.workers);
  if (settings.num_workers == 0)
    // Half of the cores decode, the other half encodes. On a GPU, and for pixels, these cores have nothing to
    // encode.
    settings.num_workers =
        settings.device.is_cuda() || options.autoencoder == "pixels" ? cores : std::max(cores / 2, 1);
  return settings;
}

PictureLaneOptions lane_options_of(const ExtractOptions& options, const ExtractSettings& settings) {
  return {.data = options.data,
          .image_size = options.image_size,
          .buckets = options.buckets,
          .bucket_min = options.bucket_min,
          .orient = options.exif_orientation == "apply",
          .enlarge = options.enlarge,
          .strict = options.strict,
          .shows_progress = true,
          .num_threads = settings.num_workers};
}

StoreInfo make_store_info(const ExtractOptions& options, const ExtractSettings& settings,
                          const ImageDataset& dataset, const Autoencoder& autoencoder,
                          const PictureLanes& lanes) {
  StoreInfo info;
  info.autoencoder = autoencoder.name;
  info.autoencoder_fingerprint = autoencoder.fingerprint;
  if (options.autoencoder != "pixels")
    info.autoencoder_path = std::filesystem::absolute(options.autoencoder).lexically_normal().string();
  info.scaling_factor = autoencoder.scaling_factor;
  info.shift_factor = autoencoder.shift_factor;
  info.channels = autoencoder.latent_channels;
  info.lanes = lanes.latent_lanes();
  info.image_size = lanes.image_size();
  info.has_image_size = lanes.has_buckets();
  info.has_logvar = autoencoder.has_posterior;
  info.num_flips = settings.num_flips;
  info.dtype = from_scalar_type(parse_compute_dtype(options.dtype, "--dtype"));
  info.class_names = dataset.class_names();
  info.source = {{"data", std::filesystem::absolute(options.data).lexically_normal().filename().string()},
                 {"layout", dataset.layout()},
                 {"num_images", dataset.records().size()},
                 {"images_xxh3", dataset_fingerprint(dataset)},
                 {"device", settings.device.is_cuda() ? "cuda" : "cpu"},
                 {"compute_dtype", options.compute_dtype},
                 {"batch", settings.batch},
                 {"exif_orientation", options.exif_orientation}};
  if (lanes.has_buckets())
    info.source.update({{"buckets", options.buckets},
                        {"bucket_min", options.bucket_min},
                        {"buckets_xxh3", lanes.fingerprint()}});
  if (options.enlarge) info.source["enlarge"] = true;
  if (options.tiles != "auto") info.source["tiles"] = options.tiles;
  if (options.tf32 && settings.device.is_cuda()) info.source["tf32"] = true;
  return info;
}

EncoderRoom encoder_room(const TextExtractOptions& options, at::Device device, EncoderRoom otherwise) {
  constexpr const char* kOption = "text-encoder-memory";
  if (options.memory.empty()) return otherwise;
  return {.bytes = bytes_left_of(kOption, options.memory, device),
          .text = fmt::format("--{} {}", kOption, options.memory)};
}

TextStoreInfo describe_text(const CaptionEncoder& encoder, const TextExtractOptions& options,
                            const std::string& compute_dtype) {
  const TextEncoderShape& shape = encoder.shape();
  TextStoreInfo info;
  info.encoder = shape.family;
  info.encoder_fingerprint = encoder.encoder_fingerprint();
  info.tokenizer_fingerprint = encoder.tokenizer_fingerprint();
  info.encoder_path = std::filesystem::absolute(options.encoder).lexically_normal().string();
  info.width = shape.width;
  info.max_tokens = encoder.max_tokens();
  info.padded = shape.users_see_padding;
  info.dtype = from_scalar_type(options.dtype.empty() ? shape.storage_dtype
                                                      : parse_compute_dtype(options.dtype, "--text-dtype"));
  info.prefix = options.captions.prefix;
  info.suffix = options.captions.suffix;
  info.instruction = options.captions.instruction;
  info.compute_dtype = compute_dtype;
  return info;
}

void require_captions(const CaptionTable& table, const std::string& data) {
  if (table.num_entries() > 1) return;
  fail("extract",
       "none of the {} samples in {} has a caption: expected metadata.jsonl with text, .txt beside the "
       "pictures or in the tars, or choose --captions png-text or file-names",
       table.num_samples(), data);
}

}  // namespace kiln
