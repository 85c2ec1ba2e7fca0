#include "extract/settings.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <sstream>

#include "core/error.h"
#include "core/tensors.h"
#include "parallel/machine.h"
#include "text/tokenizers/unicode.h"

namespace kiln {

namespace {

constexpr std::array<const char*, 2> kPngKeywords = {"Title", "Description"};

void append_data(const ImageDataset& dataset, int64_t index, std::vector<Caption>& captions) {
  const auto& own = dataset.records()[index].captions;
  captions.insert(captions.end(), own.begin(), own.end());
}

void append_png_texts(const ImageDataset& dataset, int64_t index, std::vector<Caption>& captions) {
  const PngTexts texts = dataset.png_texts(index);
  for (const char* keyword : kPngKeywords)
    for (const auto& [found, text] : texts)
      if (found == keyword) captions.push_back({.text = text, .kind = std::string("PNG ") + keyword});
}

void append_file_name(const ImageDataset& dataset, int64_t index, std::vector<Caption>& captions) {
  captions.push_back({.text = caption_of_file_name(dataset.records()[index].name), .kind = "file name"});
}

struct Source {
  const char* name;
  void (*append)(const ImageDataset& dataset, int64_t index, std::vector<Caption>& captions);
};
constexpr Source kSources[] = {
    {"data", append_data}, {"png-text", append_png_texts}, {"file-names", append_file_name}};

std::vector<const Source*> parse_sources(const std::string& text) {
  std::vector<const Source*> sources;
  std::istringstream names(text);
  for (std::string name; std::getline(names, name, ',');) {
    const auto found = std::find_if(std::begin(kSources), std::end(kSources),
                                    [&](const Source& source) { return name == source.name; });
    if (found == std::end(kSources))
      fail("extract", "--captions: expected data, png-text or file-names, or several with commas, got {:?}",
           name);
    sources.push_back(found);
  }
  if (sources.empty()) fail("extract", "--captions: expected data, png-text or file-names");
  return sources;
}

std::string without_outer_space(const std::string& text) {
  constexpr const char* kSpace = " \t\r\n";
  const auto first = text.find_first_not_of(kSpace);
  if (first == std::string::npos) return {};
  return text.substr(first, text.find_last_not_of(kSpace) + 1 - first);
}

}  // namespace

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

EncoderRoom encoder_room(const CaptionEncodingOptions& options, at::Device device, EncoderRoom otherwise) {
  constexpr const char* kOption = "text-encoder-memory";
  if (options.memory.empty()) return otherwise;
  return {.bytes = bytes_left_of(kOption, options.memory, device),
          .text = fmt::format("--{} {}", kOption, options.memory)};
}

TextStoreInfo describe_text(const CaptionEncoder& encoder, const CaptionEncodingOptions& options,
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
  info.prefix = options.prefix;
  info.suffix = options.suffix;
  info.instruction = options.instruction;
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

void check_caption_options(const CaptionOptions& options) {
  parse_sources(options.sources);
  text::check_utf8(options.prefix + options.suffix + options.instruction);
}

std::string caption_of_file_name(const std::string& name) {
  std::string stem = std::filesystem::path(name).stem().string();
  for (char& c : stem)
    if (c == '_' || c == '-' || c == '.' || c == '+') c = ' ';
  std::istringstream words(stem);
  std::vector<std::string> kept;
  for (std::string word; words >> word;) kept.push_back(word);
  const auto is_number = [](const std::string& word) {
    return std::all_of(word.begin(), word.end(), [](char c) { return c >= '0' && c <= '9'; });
  };
  if (kept.size() > 1 && is_number(kept.back())) kept.pop_back();
  std::string caption;
  for (const std::string& word : kept) caption += (caption.empty() ? "" : " ") + word;
  return caption;
}

std::vector<Caption> captions_of(const ImageDataset& dataset, int64_t index, const CaptionOptions& options) {
  std::vector<Caption> found;
  for (const Source* source : parse_sources(options.sources)) source->append(dataset, index, found);
  std::vector<Caption> captions;
  for (Caption& caption : found) {
    try {
      text::check_utf8(caption.text);
    } catch (const Error&) {
      fail("extract", "the caption of {} is no UTF-8: convert the file that holds it",
           dataset.records()[index].name);
    }
    caption.text = without_outer_space(caption.text);
    const bool is_known = std::any_of(captions.begin(), captions.end(), [&](const Caption& other) {
      return other.text == options.prefix + caption.text + options.suffix;
    });
    if (caption.text.empty() || is_known) continue;
    caption.text = options.prefix + caption.text + options.suffix;
    captions.push_back(std::move(caption));
  }
  return captions;
}

}  // namespace kiln
