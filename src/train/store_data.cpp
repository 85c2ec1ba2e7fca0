#include "train/store_data.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <tuple>

#include "core/error.h"
#include "core/text/some_of.h"
#include "data/loader/batches.h"
#include "data/text_store/joined_text.h"
#include "models/run_folder.h"
#include "run/option_values.h"
#include "train/encoding/pictures.h"
#include "train/setup.h"

namespace kiln {

namespace fs = std::filesystem;

namespace {

void check_classes(const TrainOptions& options, int64_t num_classes) {
  if (options.model.num_classes > 0 && options.model.num_classes < num_classes)
    fail("train",
         "--num-classes {} is less than the {} classes of the store {}: leave it out or give at least {}",
         options.model.num_classes, num_classes, options.data.path, num_classes);
}

void check_stores(const TrainOptions& options) {
  for (const std::string& store : options.data.more)
    if (!fs::exists(fs::path(store) / "store.json"))
      fail("train", "--more-data {} is not a feature store: run kiln extract", store);
}

void check_image_size(const TrainOptions& options, const StoreInfo& info) {
  if (info.image_size == options.data.image_size) return;
  fail("train",
       "--image-size {} does not fit the store {} of {}-pixel images: train with --image-size {} or extract "
       "again with --image-size {}",
       options.data.image_size, options.data.path, info.image_size, info.image_size, options.data.image_size);
}

std::vector<std::string> parts_of(const TrainOptions& options) {
  std::vector<std::string> folders;
  for (const StoreSource& source : sources_of(options))
    for (std::string& folder : source.parts()) folders.push_back(std::move(folder));
  return folders;
}

// Returns the name of the text store that the options choose among those beside the features.
std::string chosen_text(const TrainOptions& options) {
  const std::string& path = options.data.path;
  const std::vector<std::string> found = find_text_stores(path);
  if (found.empty())
    fail("train",
         "{} takes captions, but the store {} has none: run kiln extract --data IMAGES --out {} "
         "--text-encoder DIR",
         options.model.name, path, path);
  const std::string names = some_of(found);
  if (options.data.text.empty() && found.size() > 1)
    fail("train", "the store {} has several text stores: choose one of {} with --text", path, names);
  if (options.data.text.empty()) return found[0];
  if (std::find(found.begin(), found.end(), options.data.text) == found.end())
    fail("train", "the store {} has no text store '{}': choose one of {}", path, options.data.text, names);
  return options.data.text;
}

// Returns the text store of each part. Throws Error: one has none, or has captions of other samples.
std::vector<std::string> text_folders_of(const TrainOptions& options, const ConditioningShape& model) {
  const std::string name = chosen_text(options);
  std::vector<std::string> folders;
  for (const std::string& part : parts_of(options)) {
    const std::string folder = text_store_folder(part, name);
    if (!fs::exists(fs::path(folder) / "text.json"))
      fail("train",
           "{} has captions in text-{}, {} has none: run kiln extract --data IMAGES --out {} --text-encoder "
           "DIR",
           options.data.path, name, part, part);
    const TextStoreInfo info = read_text_store_info(folder);
    if (const int64_t num_samples = read_store_info(part).num_samples; info.num_samples != num_samples)
      fail("train",
           "{} has captions of {} samples, its features are of {}: remove it and extract the text again",
           folder, info.num_samples, num_samples);
    if (model.pads_text && !info.padded)
      fail("train", "{} attends to padding, but {} holds captions without it ({}): extract with CLIP",
           options.model.name, folder, info.encoder);
    folders.push_back(folder);
    require_same_encoder(read_text_store_info(folders.front()), folders.front(), info, folder);
  }
  return folders;
}

std::string part_identity(const std::string& folder, const std::string& text_folder) {
  const StoreInfo info = read_store_info(folder);
  std::string identity =
      fmt::format("{} samples, {} {}", info.num_samples, info.autoencoder, info.autoencoder_fingerprint);
  for (const StoreInfo::Shard& shard : info.shards) identity += " " + shard.xxh3;
  if (text_folder.empty()) return identity;
  return identity + identity_of(read_text_store_info(text_folder));
}

std::vector<SampleLane> split_of(const TrainOptions& options, const std::vector<SampleLane>& all, Split split,
                                 const std::function<std::string(int64_t)>& name_of) {
  const double share = options.validation.share;
  if (share == 0) return {};
  std::vector<SampleLane> lanes = split_lanes(all, share, split, name_of);
  if (split == Split::kHeldOut && samples_per_pass(lanes) == 0)
    fail("train", "--validation-share {:g} holds none of the {} samples out: give a larger share", share,
         samples_per_pass(all));
  if (split == Split::kTraining)
    for (size_t lane = 0; lane < lanes.size(); ++lane)
      if (lanes[lane].size() == 0)
        fail("train",
             "--validation-share {:g} holds out all {} samples of bucket number {}: give a smaller share, or "
             "a larger "
             "--bucket-min where the buckets are made",
             share, all[lane].size(), lane);
  return lanes;
}

// Separates the identities of parts.
constexpr const char* kJoint = " + ";

// Takes parts of the sources, from number `source` on, as long as `rest` begins with their identities.
// Appends the number of parts of each source to `counts`. Returns false if they do not match.
bool match(const std::vector<StoreSource>& sources, const std::vector<std::vector<std::string>>& texts,
           size_t source, std::string_view rest, std::vector<int64_t>& counts) {
  if (source == sources.size()) return rest.empty();
  const std::vector<std::string> parts = sources[source].parts();
  for (size_t part = 0; part < parts.size(); ++part) {
    std::string identity = part_identity(parts[part], texts.empty() ? "" : texts[source][part]);
    if (source > 0 || part > 0) identity.insert(0, kJoint);
    if (!rest.starts_with(identity)) return false;
    rest.remove_prefix(identity.size());
    counts.push_back(static_cast<int64_t>(part) + 1);
    if (match(sources, texts, source + 1, rest, counts)) return true;
    counts.pop_back();
  }
  return false;
}

}  // namespace

std::vector<StoreSource> sources_of(const TrainOptions& options) {
  const auto& [path, more, weights, parts] =
      std::tie(options.data.path, options.data.more, options.data.weights, options.data.parts);
  std::vector<StoreSource> sources;
  for (size_t i = 0; i <= more.size(); ++i)
    sources.push_back({.store = i == 0 ? path : more[i - 1],
                       .weight = weights.empty() ? 1 : weights.at(i),
                       .num_parts = parts.empty() ? 0 : parts.at(i)});
  return sources;
}

bool has_store(const TrainOptions& options) { return fs::exists(fs::path(options.data.path) / "store.json"); }

int64_t own_image_size(const TrainOptions& options) {
  return has_store(options) ? read_store_info(options.data.path).image_size : own_image_size(options.model);
}

void require_data(const TrainOptions& options) {
  if (!fs::exists(options.data.path))
    fail("train",
         "--data {} does not exist: give a store made by kiln extract, images with --autoencoder, or "
         "'synthetic'",
         options.data.path);
  if (has_store(options)) return check_stores(options);
  if (is_run_folder(options.data.path))
    fail("train", "--data {} is the folder of a run: give the store or the pictures to train on",
         options.data.path);
  if (options.data.autoencoder.empty())
    fail("train",
         "--data {} is not a feature store: run kiln extract, or encode while training with --autoencoder "
         "PATH or pixels",
         options.data.path);
}

StoredSamples describe_stores(const TrainOptions& options) {
  check_stores(options);
  StoredSamples samples{.info = read_sources_info(sources_of(options))};
  const StoreInfo& info = samples.info;
  check_image_size(options, info);
  const int64_t store_classes = static_cast<int64_t>(info.class_names.size());
  check_classes(options, store_classes);
  samples.shape = store_shape(info);
  samples.shape.num_classes = store_classes > 0 ? std::max(store_classes, options.model.num_classes) : 0;
  const ConditioningShape conditioning = conditioning_of(options, samples.shape);
  if (!conditioning.takes_labels()) samples.shape.num_classes = 0;
  if (conditioning.takes_text())
    samples.text_folders = text_folders_of(options, conditioning);
  else if (!options.data.text.empty())
    fail("train", "--text {}: {} takes no captions, leave it out", options.data.text, options.model.name);
  return samples;
}

std::string identity_of(const TextStoreInfo& text) {
  return fmt::format("; captions {} by {} {} {}, up to {} tokens in {}{}", text.captions_fingerprint,
                     text.encoder, text.encoder_fingerprint, text.tokenizer_fingerprint, text.max_tokens,
                     dtype_name(text.dtype),
                     text.instruction.empty() ? "" : fmt::format(" after {:?}", text.instruction));
}

std::string identity_of(const TrainOptions& options, const std::vector<std::string>& text_folders) {
  const std::vector<std::string> parts = parts_of(options);
  std::string identity;
  for (size_t i = 0; i < parts.size(); ++i)
    identity += (i > 0 ? kJoint : "") + part_identity(parts[i], text_folders.empty() ? "" : text_folders[i]);
  return identity;
}

std::optional<std::vector<int64_t>> parts_of_identity(const TrainOptions& options,
                                                      const std::string& identity) {
  if (!has_store(options)) return std::nullopt;
  check_stores(options);
  const std::vector<StoreSource> sources = sources_of(options);
  // Captions of the identity are those of the text store that the options choose.
  std::vector<std::vector<std::string>> texts;
  if (identity.find("; captions ") != std::string::npos) {
    const std::string name = chosen_text(options);
    for (const StoreSource& source : sources)
      for (auto& folders = texts.emplace_back(); const std::string& part : source.parts())
        folders.push_back(text_store_folder(part, name));
  }
  std::vector<int64_t> counts;
  if (!match(sources, texts, 0, identity, counts)) return std::nullopt;
  return counts;
}

std::vector<SampleLane> split_of(const TrainOptions& options, const FeatureStore& store, Split split) {
  return split_of(options, store.sample_lanes(), split, [&](int64_t id) { return store.sample_name(id); });
}

std::vector<SampleLane> split_of(const TrainOptions& options, const Pictures& pictures, Split split) {
  return split_of(options, pictures.lanes->sample_lanes(), split,
                  [&](int64_t id) { return pictures.images->records()[static_cast<size_t>(id)].name; });
}

TrainOptions of_validation(TrainOptions options) {
  options.data.weights.clear();
  if (options.validation.share > 0) return options;
  options.data.path = options.validation.data;
  options.data.more.clear();
  options.data.parts.clear();
  return options;
}

Pictures open_validation_pictures(const TrainOptions& options, const Pictures& trained, int64_t downsample) {
  TrainOptions own = of_validation(options);
  if (!trained.lanes) own.data.buckets.clear();
  return open_pictures(own, own.data.path, downsample,
                       trained.lanes ? trained.lanes->buckets() : std::vector<Bucket>(), "--validation-data");
}

int64_t validation_samples(const TrainOptions& options) {
  if (options.validation.images > 0) return options.validation.images;
  const TrainOptions own = of_validation(options);
  const bool is_split = options.validation.share > 0;
  if (has_store(own))
    return is_split ? samples_per_pass(split_of(own, *open_sources(sources_of(own)), Split::kHeldOut))
                    : samples_per_epoch(sources_of(own));
  Pictures trained;  // read only where they matter: all their headers are
  const bool fits_to_trained =
      !options.data.buckets.empty() && !has_store(options) && fs::exists(options.data.path);
  if (is_split || fits_to_trained) trained = open_pictures(options, options.data.path, /*downsample=*/1);
  return is_split ? samples_per_pass(split_of(options, trained, Split::kHeldOut))
                  : open_validation_pictures(options, trained, /*downsample=*/1).lanes->num_places();
}

int64_t steps_of_epochs(double epochs, int64_t samples, int64_t global_batch) {
  const double steps = epochs * static_cast<double>(samples) / static_cast<double>(global_batch);
  return std::max<int64_t>(1, static_cast<int64_t>(std::ceil(steps * (1 - 1e-12))));
}

int64_t samples_of(const TrainOptions& options) {
  if (options.data.is_synthetic()) return 0;
  require_data(options);
  const bool is_split = options.validation.share > 0;
  if (has_store(options))
    return is_split
               ? samples_per_pass(split_of(options, *open_sources(sources_of(options)), Split::kTraining))
               : samples_per_epoch(sources_of(options));
  const Pictures pictures = open_pictures(options, options.data.path, /*downsample=*/1);
  return is_split ? samples_per_pass(split_of(options, pictures, Split::kTraining))
                  : pictures.lanes->num_places();
}

TrainOptions with_length(TrainOptions options, int64_t num_samples) {
  if (options.epochs == 0) return options;
  if (num_samples == 0 && !options.data.path.empty()) num_samples = samples_of(options);
  if (num_samples == 0)
    fail("train", "--epochs {:g}: {} data are endless: give steps", options.epochs,
         options.data.path.empty() ? "synthetic" : options.data.path);
  options.max_steps = steps_of_epochs(options.epochs, num_samples, options.global_batch);
  options.epochs = 0;
  return options;
}

}  // namespace kiln
