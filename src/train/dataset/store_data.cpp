#include "train/dataset/store_data.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "core/error.h"
#include "core/text/some_of.h"
#include "data/text_store/text_store.h"
#include "run/option_values.h"
#include "train/encoding/pictures.h"

namespace kiln {

namespace fs = std::filesystem;

namespace {

std::vector<std::string> parts_of(const StoredData& data) {
  std::vector<std::string> folders;
  for (const StoreSource& source : data.stores())
    for (std::string& folder : source.parts()) folders.push_back(std::move(folder));
  return folders;
}

// Returns the name of the text store that the options choose among those beside the features, for a model of
// this name.
std::string chosen_text(const DataOptions& options, const std::string& model) {
  const std::string& path = options.path;
  const std::vector<std::string> found = find_text_stores(path);
  if (found.empty())
    fail("train",
         "{} takes captions, but the store {} has none: run kiln extract --data IMAGES --out {} "
         "--text-encoder DIR",
         model, path, path);
  const std::string names = some_of(found);
  if (options.text.empty() && found.size() > 1)
    fail("train", "the store {} has several text stores: choose one of {} with --text", path, names);
  if (options.text.empty()) return found[0];
  if (std::find(found.begin(), found.end(), options.text) == found.end())
    fail("train", "the store {} has no text store '{}': choose one of {}", path, options.text, names);
  return options.text;
}

std::string part_identity(const std::string& folder, const std::string& text_folder) {
  const StoreInfo info = read_store_info(folder);
  std::string identity =
      fmt::format("{} samples, {} {}", info.num_samples, info.autoencoder, info.autoencoder_fingerprint);
  for (const StoreInfo::Shard& shard : info.shards) identity += " " + shard.xxh3;
  if (text_folder.empty()) return identity;
  return identity + identity_of(read_text_store_info(text_folder));
}

std::vector<SampleLane> split_of(double share, const std::vector<SampleLane>& all, Split split,
                                 const std::function<std::string(int64_t)>& name_of) {
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

int64_t own_image_size(const TrainOptions& options) {
  const std::optional<int64_t> stored = stored_image_size(options.data);
  return stored ? *stored : own_image_size(options.model);
}

std::vector<std::string> text_folders_of(const StoredData& data, const std::string& model, bool pads_text) {
  const std::string name = chosen_text(data.options, model);
  std::vector<std::string> folders;
  for (const std::string& part : parts_of(data)) {
    const std::string folder = text_store_folder(part, name);
    if (!fs::exists(fs::path(folder) / "text.json"))
      fail("train",
           "{} has captions in text-{}, {} has none: run kiln extract --data IMAGES --out {} --text-encoder "
           "DIR",
           data.options.path, name, part, part);
    const TextStoreInfo info = read_text_store_info(folder);
    if (const int64_t num_samples = read_store_info(part).num_samples; info.num_samples != num_samples)
      fail("train",
           "{} has captions of {} samples, its features are of {}: remove it and extract the text again",
           folder, info.num_samples, num_samples);
    if (pads_text && !info.padded)
      fail("train", "{} attends to padding, but {} holds captions without it ({}): extract with CLIP", model,
           folder, info.encoder);
    folders.push_back(folder);
    require_same_encoder(read_text_store_info(folders.front()), folders.front(), info, folder);
  }
  return folders;
}

std::string identity_of(const TextStoreInfo& text) {
  return fmt::format("; captions {} by {} {} {}, up to {} tokens in {}{}", text.captions_fingerprint,
                     text.encoder, text.encoder_fingerprint, text.tokenizer_fingerprint, text.max_tokens,
                     dtype_name(text.dtype),
                     text.instruction.empty() ? "" : fmt::format(" after {:?}", text.instruction));
}

std::string identity_of(const StoredData& data, const std::vector<std::string>& text_folders) {
  const std::vector<std::string> parts = parts_of(data);
  std::string identity;
  for (size_t i = 0; i < parts.size(); ++i)
    identity += (i > 0 ? kJoint : "") + part_identity(parts[i], text_folders.empty() ? "" : text_folders[i]);
  return identity;
}

std::optional<std::vector<int64_t>> parts_of_identity(const TrainOptions& options,
                                                      const std::string& identity) {
  const DataSource source = source_of(options.data);
  const auto* stored = std::get_if<StoredData>(&source);
  if (!stored) return std::nullopt;
  require_here(source);
  const std::vector<StoreSource> sources = stored->stores();
  // Captions of the identity are those of the text store that the options choose.
  std::vector<std::vector<std::string>> texts;
  if (identity.find("; captions ") != std::string::npos) {
    const std::string name = chosen_text(options.data, options.model.name);
    for (const StoreSource& store : sources)
      for (auto& folders = texts.emplace_back(); const std::string& part : store.parts())
        folders.push_back(text_store_folder(part, name));
  }
  std::vector<int64_t> counts;
  if (!match(sources, texts, 0, identity, counts)) return std::nullopt;
  return counts;
}

std::vector<SampleLane> split_of(double share, const FeatureStore& store, Split split) {
  return split_of(share, store.sample_lanes(), split, [&](int64_t id) { return store.sample_name(id); });
}

std::vector<SampleLane> split_of(double share, const Pictures& pictures, Split split) {
  return split_of(share, pictures.lanes->sample_lanes(), split,
                  [&](int64_t id) { return pictures.images->records()[static_cast<size_t>(id)].name; });
}

Pictures open_validation_pictures(DataOptions held_out, const Pictures& trained, int64_t downsample) {
  if (!trained.lanes) held_out.buckets.clear();
  return open_pictures(held_out, held_out.path, downsample,
                       trained.lanes ? trained.lanes->buckets() : std::vector<Bucket>(), "--validation-data");
}

int64_t steps_of_epochs(double epochs, int64_t samples, int64_t global_batch) {
  const double steps = epochs * static_cast<double>(samples) / static_cast<double>(global_batch);
  return std::max<int64_t>(1, static_cast<int64_t>(std::ceil(steps * (1 - 1e-12))));
}

namespace {

int64_t samples_of(const SyntheticData&, double, Split) { return 0; }

int64_t samples_of(const StoredData& data, double share, Split split) {
  return share > 0 ? samples_per_pass(split_of(share, *open_sources(data.stores()), split))
                   : samples_per_epoch(data.stores());
}

int64_t samples_of(const PictureData& data, double share, Split split) {
  const Pictures pictures = open_pictures(data.options, data.options.path, /*downsample=*/1);
  return share > 0 ? samples_per_pass(split_of(share, pictures, split)) : pictures.lanes->num_places();
}

int64_t samples_of(const DataSource& source, double share, Split split) {
  return std::visit([&](const auto& data) { return samples_of(data, share, split); }, source);
}

}  // namespace

int64_t samples_of(const TrainOptions& options) {
  const DataSource source = source_of(options.data);
  require_here(source);
  return samples_of(source, options.validation.share, Split::kTraining);
}

int64_t validation_samples(const TrainOptions& options, Pictures trained) {
  if (options.validation.images > 0) return options.validation.images;
  const double share = options.validation.share;
  const DataSource source = source_of(held_out_options(options.data, options.validation));
  const auto* pictures = std::get_if<PictureData>(&source);
  if (!pictures) return samples_of(source, share, Split::kHeldOut);
  const bool fits_to_trained =
      !options.data.buckets.empty() && is_here(options.data) && reads_pictures(source_of(options.data));
  if (!trained.lanes && (share > 0 || fits_to_trained))  // only then, because it reads all their headers
    trained = open_pictures(options.data, options.data.path, /*downsample=*/1);
  return share > 0
             ? samples_per_pass(split_of(share, trained, Split::kHeldOut))
             : open_validation_pictures(pictures->options, trained, /*downsample=*/1).lanes->num_places();
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
