#include "train/dataset/data_source.h"

#include <algorithm>
#include <filesystem>
#include <string>
#include <tuple>

#include "core/error.h"
#include "models/model_record.h"

namespace kiln {

namespace fs = std::filesystem;

namespace {

void require_fit(const SyntheticData& data) {
  const DataOptions& options = data.options;
  if (!options.is_synthetic()) return;  // a plan's
  if (!options.in_pixels() && !options.autoencoder.empty())
    fail("train", "--autoencoder with --data synthetic expects pixels or nothing, got {}",
         options.autoencoder);
  if (!options.more.empty()) fail("train", "--more-data has no effect with --data synthetic: leave it out");
}

void require_fit(const StoredData& data) {
  for (const std::string& store : data.options.more)
    if (!is_store(store)) fail("train", "--more-data {} is not a feature store: run kiln extract", store);
}

void require_fit(const PictureData& data) {
  const std::string& path = data.options.path;
  if (path.empty()) return;  // a plan's
  if (!fs::exists(path))
    fail("train",
         "--data {} does not exist: give a store made by kiln extract, images with --autoencoder, or "
         "'synthetic'",
         path);
  if (is_run_folder(path))
    fail("train", "--data {} is the folder of a run: give the store or the pictures to train on", path);
  if (data.options.autoencoder.empty())
    fail("train",
         "--data {} is not a feature store: run kiln extract, or encode while training with --autoencoder "
         "PATH or pixels",
         path);
  if (!data.options.more.empty())
    fail("train", "--more-data needs feature stores, but --data {} is not one: run kiln extract", path);
}

}  // namespace

std::vector<StoreSource> StoredData::stores() const {
  const auto& [path, more, weights, parts] =
      std::tie(options.path, options.more, options.weights, options.parts);
  std::vector<StoreSource> sources;
  for (size_t i = 0; i <= more.size(); ++i)
    sources.push_back({.store = i == 0 ? path : more[i - 1],
                       .weight = weights.empty() ? 1 : weights.at(i),
                       .num_parts = parts.empty() ? 0 : parts.at(i)});
  return sources;
}

DataSource source_of(const DataOptions& options) {
  const bool is_plan = options.path.empty();
  if (is_plan ? options.autoencoder.empty() || options.in_pixels() : options.is_synthetic())
    return SyntheticData{options};
  if (!is_plan && is_store(options.path)) return StoredData{options};
  return PictureData{options};
}

DataOptions held_out_options(DataOptions data, const ValidationOptions& validation) {
  data.weights.clear();
  if (validation.share > 0) return data;
  data.path = validation.data;
  data.more.clear();
  data.parts.clear();
  return data;
}

bool is_here(const DataOptions& options) {
  const auto is_there = [](const std::string& path) {
    std::error_code unreachable;  // another user's folder counts as missing
    return fs::exists(path, unreachable);
  };
  return options.is_synthetic() || (is_there(options.path) && std::ranges::all_of(options.more, is_there));
}

void require_here(const DataSource& source) {
  std::visit([](const auto& data) { require_fit(data); }, source);
}

void require_autoencoder(const DataOptions& data) {
  std::error_code unreachable;
  if (!data.autoencoder.empty() && !data.in_pixels() && !data.is_synthetic() &&
      !fs::exists(data.autoencoder, unreachable))
    fail("train", "--autoencoder {} does not exist: give pixels, a diffusers folder or a weights file",
         data.autoencoder);
}

bool reads_pictures(const DataSource& source) { return std::holds_alternative<PictureData>(source); }

bool encodes_pictures(const DataSource& source) {
  const auto* pictures = std::get_if<PictureData>(&source);
  return pictures && pictures->are_encoded();
}

bool encodes_held_out(const DataOptions& data, const ValidationOptions& validation) {
  const DataOptions held_out = held_out_options(data, validation);
  return (validation.share > 0 || is_here(held_out)) && encodes_pictures(source_of(held_out));
}

std::vector<std::string> data_settings_without_effect(const DataOptions& data,
                                                      const ValidationOptions& validation) {
  const ValidationOptions defaults;
  std::vector<std::string> lines;
  const auto note_if = [&](bool ineffective, const char* option, const std::string& where) {
    if (ineffective) lines.push_back(fmt::format("--{} has no effect {}", option, where));
  };
  const bool validates = validation.is_on(), are_pictures = reads_pictures(source_of(data));
  note_if(!data.weights.empty() && data.more.empty(), "data-weights",
          "on a single store, without --more-data");
  const bool encodes_captions = are_pictures && !data.text_encoder.empty();
  note_if(!data.text.empty() && encodes_captions, "text",
          "on pictures, whose captions --text-encoder encodes");
  const CaptionEncodingOptions &captions = data.captions, usual;
  for (const auto& [option, is_given] :
       {std::pair{"text-max-tokens", captions.max_tokens != usual.max_tokens},
        {"text-dtype", captions.dtype != usual.dtype},
        {"text-batch", captions.batch != usual.batch},
        {"text-encoder-memory", captions.memory != usual.memory},
        {"captions", captions.sources != usual.sources},
        {"caption-prefix", captions.prefix != usual.prefix},
        {"caption-suffix", captions.suffix != usual.suffix},
        {"caption-instruction", captions.instruction != usual.instruction}})
    note_if(is_given && !encodes_captions, option, "without pictures whose captions --text-encoder encodes");
  note_if(!data.buckets.empty() && !are_pictures, "buckets", "on features: use kiln extract --buckets");
  const bool validates_on_pictures =
      validates && reads_pictures(source_of(held_out_options(data, validation)));
  note_if(data.enlarge && !are_pictures && !validates_on_pictures, "enlarge",
          "on features: use kiln extract --enlarge");
  note_if(validation.every != defaults.every && !validates, "validate-every",
          "without --validation-data or --validation-share");
  note_if(validation.images > 0 && !validates, "validation-images",
          "without --validation-data or --validation-share");
  return lines;
}

std::optional<int64_t> stored_image_size(const DataOptions& options) {
  if (!std::holds_alternative<StoredData>(source_of(options))) return std::nullopt;
  return read_store_info(options.path).image_size;
}

}  // namespace kiln
