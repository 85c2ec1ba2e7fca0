#include "data/store/store_source.h"

#include <algorithm>
#include <filesystem>

#include "core/error.h"

namespace kiln {

namespace fs = std::filesystem;

namespace {

// A part of a source, with its place in the joined store.
struct Part {
  StoreInfo info;
  std::string folder;
  double weight = 1;
  int64_t first = 0;           // its first sample there
  std::vector<int64_t> lanes;  // lane of the joined store for each of its own
};

std::vector<Part> read_parts(std::span<const StoreSource> sources) {
  std::vector<Part> parts;
  for (const StoreSource& source : sources) {
    // A weight is a share among several sources, so it has no effect on a single one.
    const double weight = sources.size() > 1 ? source.weight : 1;
    for (const std::string& folder : source.parts())
      parts.push_back({.info = read_store_info(folder), .folder = folder, .weight = weight, .lanes = {}});
  }
  return parts;
}

// Returns the info of the joined store and gives each part its place. Throws Error: parts that do not fit
// each other.
StoreInfo join_infos(std::vector<Part>& parts) {
  StoreInfo joined = parts.front().info;
  joined.shards.clear();
  joined.lanes.clear();
  joined.num_samples = 0;
  for (Part& part : parts) {
    require_same_features(parts.front().info, parts.front().folder, part.info, part.folder);
    part.first = joined.num_samples;
    joined.num_samples += part.info.num_samples;
    for (const Lane& lane : part.info.lanes) {
      const auto found = std::ranges::find(joined.lanes, lane) - joined.lanes.begin();
      if (found == std::ssize(joined.lanes)) joined.lanes.push_back(lane);
      part.lanes.push_back(found);
    }
    for (StoreInfo::Shard shard : part.info.shards) {
      shard.file = (fs::path(part.folder) / shard.file).string();
      shard.lane = part.lanes[static_cast<size_t>(shard.lane)];
      joined.shards.push_back(std::move(shard));
    }
  }
  return joined;
}

std::vector<SampleLane> join_lanes(const std::vector<Part>& parts, size_t num_lanes) {
  std::vector<SampleLane> joined(num_lanes);
  for (const Part& part : parts) {
    const std::vector<SampleLane> lanes = part.info.sample_lanes();
    for (size_t lane = 0; lane < lanes.size(); ++lane)
      for (const SampleRange& range : lanes[lane].samples)
        joined[static_cast<size_t>(part.lanes[lane])].samples.push_back(
            {.first = part.first + range.first, .count = range.count, .weight = part.weight});
  }
  return joined;
}

// Throws the Error that says why two stores cannot be one data set.
[[noreturn]] void refuse(const std::string& other, const std::string& first, const std::string& what,
                         const std::string& theirs, const std::string& ours) {
  fail("feature store", "{} has {} {}, {} has {}: extract it again with the settings of {}", other, what,
       theirs, first, ours, first);
}

}  // namespace

std::string appended_part_folder(const std::string& store, int64_t number) {
  return (fs::path(store) / fmt::format("appended-{:05}", number)).string();
}

std::vector<std::string> store_parts(const std::string& store) {
  std::vector<std::string> folders = {store};
  for (int64_t number = 1;; ++number) {
    const std::string folder = appended_part_folder(store, number);
    if (!is_store(folder) || !read_store_info(folder).complete) return folders;
    folders.push_back(folder);
  }
}

std::vector<std::string> StoreSource::parts() const {
  std::vector<std::string> folders = store_parts(store);
  if (std::cmp_less(folders.size(), num_parts))
    fail("feature store", "{} has {} parts, {} were trained on: put the missing ones back", store,
         folders.size(), num_parts);
  if (num_parts > 0) folders.resize(static_cast<size_t>(num_parts));
  return folders;
}

void require_same_features(const StoreInfo& first, const std::string& first_name, const StoreInfo& other,
                           const std::string& other_name) {
  const auto require = [&](const std::string& ours, const std::string& theirs, const char* what) {
    if (ours != theirs) refuse(other_name, first_name, what, theirs, ours);
  };
  const auto encoder = [](const StoreInfo& info) {
    return fmt::format(
        "{} {}", info.autoencoder,
        info.autoencoder_fingerprint.empty() ? "of unknown weights" : info.autoencoder_fingerprint);
  };
  const auto yes_or_no = [](bool value) { return std::string(value ? "yes" : "no"); };
  require(encoder(first), encoder(other), "latents of the autoencoder");
  require(fmt::format("{} times {}", first.channels, first.scaling_factor),
          fmt::format("{} times {}", other.channels, other.scaling_factor), "latent channels");
  require(fmt::format("{}", first.shift_factor), fmt::format("{}", other.shift_factor), "the shift factor");
  require(yes_or_no(first.already_scaled), yes_or_no(other.already_scaled), "scaled latents:");
  require(yes_or_no(first.has_logvar), yes_or_no(other.has_logvar), "a posterior:");
  require(fmt::format("{}", first.image_size), fmt::format("{}", other.image_size), "pictures of size");
  require(yes_or_no(first.has_image_size), yes_or_no(other.has_image_size), "the original pictures' sizes:");
  require(first.num_flips == 2 ? "both" : "none", other.num_flips == 2 ? "both" : "none", "--flip");
  if (first.class_names != other.class_names)
    refuse(other_name, first_name, "classes of other names:", fmt::format("{}", other.class_names.size()),
           fmt::format("{}", first.class_names.size()));
}

std::shared_ptr<FeatureStore> open_sources(std::span<const StoreSource> sources) {
  std::vector<Part> parts = read_parts(sources);
  if (parts.size() == 1) return FeatureStore::open(parts.front().folder);
  JoinedParts joined{.info = join_infos(parts), .parts = {}, .lanes = {}, .sources = {}};
  joined.lanes = join_lanes(parts, joined.info.lanes.size());
  auto part = parts.begin();
  for (const StoreSource& source : sources) {
    SampleSource samples{.name = source.store, .first = part->first};
    for (size_t i = 0; i < source.parts().size(); ++i) samples.count += (part++)->info.num_samples;
    if (sources.size() > 1) joined.sources.push_back(std::move(samples));
  }
  for (Part& each : parts) joined.parts.push_back({std::move(each.folder), std::move(each.info)});
  return FeatureStore::join(std::move(joined));
}

StoreInfo read_sources_info(std::span<const StoreSource> sources) {
  std::vector<Part> parts = read_parts(sources);
  return parts.size() == 1 ? parts.front().info : join_infos(parts);
}

int64_t samples_per_epoch(std::span<const StoreSource> sources) {
  std::vector<Part> parts = read_parts(sources);
  if (parts.size() == 1) return parts.front().info.num_samples;
  const StoreInfo info = join_infos(parts);
  int64_t samples = 0;
  for (const SampleLane& lane : join_lanes(parts, info.lanes.size())) samples += lane.size();
  return samples;
}

}  // namespace kiln
