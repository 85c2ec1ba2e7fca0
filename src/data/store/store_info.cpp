// Converts store.json to StoreInfo, with every field checked, and back.
#include <cmath>
#include <filesystem>
#include <set>

#include "core/error.h"
#include "core/files/input_file.h"
#include "core/json_fields.h"
#include "core/text/json_text.h"
#include "core/text/utf8.h"
#include "data/store/store_info.h"

namespace kiln {
namespace {

using nlohmann::json;

constexpr int kStoreFormatVersion = 2;
constexpr const char* kFormatName = "kiln feature store";
constexpr int64_t kMaxLanes = 4096, kMaxSize = 1 << 16;

// Typed access to the fields of one JSON object.
class Fields {
 public:
  Fields(const json& object, std::string where) : object_(object), where_(std::move(where)) {
    if (!object_.is_object())
      fail("feature store", "expected a JSON object, got {} ({})", object_.type_name(), where_);
  }

  std::string text(const char* key) const {
    return get(key, "a string", [](const json& v) { return v.is_string(); }).get<std::string>();
  }
  bool flag(const char* key) const {
    return get(key, "true or false", [](const json& v) { return v.is_boolean(); }).get<bool>();
  }
  double number(const char* key) const {
    const auto finite = [](const json& v) { return v.is_number() && std::isfinite(v.get<double>()); };
    return get(key, "a finite number", finite).get<double>();
  }
  int64_t count(const char* key, int64_t minimum, int64_t maximum) const {
    const auto in_range = [&](const json& v) {
      return is_integer(v) && v.get<int64_t>() >= minimum && v.get<int64_t>() <= maximum;
    };
    return get(key, fmt::format("an integer from {} to {}", minimum, maximum), in_range).get<int64_t>();
  }
  const json& list(const char* key) const {
    return get(key, "a list", [](const json& v) { return v.is_array(); });
  }
  const std::string& where() const { return where_; }

 private:
  template <class Accepts>
  const json& get(const char* key, const std::string& expected, const Accepts& accepts) const {
    const auto found = object_.find(key);
    if (found == object_.end())
      fail("feature store", "expected {} in \"{}\", got nothing ({})", expected, key, where_);
    if (!accepts(*found))
      fail("feature store", "expected {} in \"{}\", got {} ({})", expected, key, brief(*found), where_);
    return *found;
  }

  const json& object_;
  std::string where_;
};

void check_version(const Fields& fields) {
  if (fields.text("format") != kFormatName)
    fail("feature store", "expected format \"{}\", got \"{}\" ({}): not a feature store", kFormatName,
         fields.text("format").substr(0, 80), fields.where());
  const int64_t version = fields.count("format_version", 1, 1'000'000);
  if (version > kStoreFormatVersion)
    fail("feature store",
         "expected format version {} at most, got {} ({}): it was written by a newer kiln, update",
         kStoreFormatVersion, version, fields.where());
}

std::vector<StoreInfo::Shard> parse_shards(const json& list, const std::string& where) {
  std::vector<StoreInfo::Shard> shards;
  std::set<std::string> names;
  for (const json& entry : list) {
    const Fields fields(entry, where);
    StoreInfo::Shard shard{fields.text("file"), fields.count("num_samples", 1, int64_t{1} << 40),
                           fields.text("xxh3"),
                           entry.contains("lane") ? fields.count("lane", 0, kMaxLanes) : 0};
    if (entry.contains("columns_xxh3")) shard.columns_xxh3 = fields.text("columns_xxh3");
    // Only a plain name is allowed: store.json must not reach out of its folder.
    if (shard.file.empty() || shard.file[0] == '.' || shard.file.find('/') != std::string::npos ||
        shard.file.find('\0') != std::string::npos)
      fail("feature store", "expected a plain file name for a shard, got {:?} ({})", shard.file.substr(0, 80),
           where);
    if (!names.insert(shard.file).second)
      fail("feature store", "shard {} is listed twice ({})", shard.file, where);
    shards.push_back(std::move(shard));
  }
  return shards;
}

std::vector<Lane> parse_lanes(const Fields& fields) {
  if (fields.count("format_version", 1, kStoreFormatVersion) == 1)
    return {{.height = fields.count("height", 1, kMaxSize), .width = fields.count("width", 1, kMaxSize)}};
  std::vector<Lane> lanes;
  for (const json& entry : fields.list("lanes")) {
    const Fields lane(entry, fields.where());
    lanes.push_back({.height = lane.count("height", 1, kMaxSize),
                     .width = lane.count("width", 1, kMaxSize),
                     .aspect_ratio = entry.contains("aspect_ratio") ? lane.number("aspect_ratio") : 0});
    if (lanes.back().aspect_ratio < 0)
      fail("feature store", "expected an aspect_ratio above 0, got {} ({})", lanes.back().aspect_ratio,
           fields.where());
  }
  if (lanes.empty() || static_cast<int64_t>(lanes.size()) > kMaxLanes)
    fail("feature store", "expected 1 to {} lanes, got {} ({})", kMaxLanes, lanes.size(), fields.where());
  return lanes;
}

}  // namespace

std::vector<SampleLane> StoreInfo::sample_lanes() const {
  std::vector<SampleLane> of_lanes(lanes.size());
  int64_t first = 0;
  for (const Shard& shard : shards) {
    std::vector<SampleRange>& ranges = of_lanes[static_cast<size_t>(shard.lane)].samples;
    if (!ranges.empty() && ranges.back().first + ranges.back().count == first)
      ranges.back().count += shard.num_samples;
    else
      ranges.push_back({.first = first, .count = shard.num_samples});
    first += shard.num_samples;
  }
  return of_lanes;
}

void StoreInfo::drop_empty_lanes() {
  std::vector<int64_t> new_index(lanes.size());
  std::vector<Lane> kept;
  const std::vector<SampleLane> of_lanes = sample_lanes();
  for (size_t lane = 0; lane < lanes.size(); ++lane) {
    new_index[lane] = static_cast<int64_t>(kept.size());
    if (of_lanes[lane].size() > 0) kept.push_back(lanes[lane]);
  }
  for (Shard& shard : shards) shard.lane = new_index[static_cast<size_t>(shard.lane)];
  lanes = std::move(kept);
}

StoreInfo parse_store_info(std::string_view text, const std::string& where) {
  const json root = parse_json("feature store", text, where);
  const Fields fields(root, where);
  check_version(fields);
  StoreInfo info;
  info.autoencoder = fields.text("autoencoder");
  info.autoencoder_fingerprint = fields.text("autoencoder_fingerprint");
  if (root.contains("autoencoder_path")) info.autoencoder_path = fields.text("autoencoder_path");
  info.scaling_factor = fields.number("scaling_factor");
  info.shift_factor = fields.number("shift_factor");
  if (info.scaling_factor == 0) fail("feature store", "expected a scaling_factor other than 0 ({})", where);
  info.channels = fields.count("channels", 1, kMaxSize);
  info.lanes = parse_lanes(fields);
  info.image_size = fields.count("image_size", 1, kMaxSize);
  constexpr int64_t kMaxLatentSize = int64_t{1} << 31;
  for (size_t lane = 0; lane < info.lanes.size(); ++lane)
    if (const int64_t size = info.latent_size(static_cast<int64_t>(lane)); size > kMaxLatentSize)
      fail("feature store", "expected latents of at most {} elements, got {} ({})", kMaxLatentSize, size,
           where);
  info.has_logvar = fields.flag("has_logvar");
  info.already_scaled = fields.flag("already_scaled");
  if (root.contains("has_image_size")) info.has_image_size = fields.flag("has_image_size");
  info.num_flips = fields.count("num_flips", 1, 2);
  info.dtype = parse_dtype(fields.text("dtype"));
  if (info.dtype != Dtype::kF32 && info.dtype != Dtype::kBF16 && info.dtype != Dtype::kF16)
    fail("feature store", "expected dtype F32, BF16 or F16, got {} ({})", dtype_name(info.dtype), where);
  for (const json& name : fields.list("class_names")) {
    if (!name.is_string())
      fail("feature store", "expected strings in \"class_names\", got {} ({})", name.type_name(), where);
    info.class_names.push_back(name.get<std::string>());
  }
  info.shards = parse_shards(fields.list("shards"), where);
  info.num_samples = fields.count("num_samples", 0, int64_t{1} << 40);
  int64_t sum = 0;
  for (const auto& shard : info.shards) {
    if (shard.lane >= static_cast<int64_t>(info.lanes.size()))
      fail("feature store", "shard {} names lane {}, but the store has {} lanes ({})", shard.file, shard.lane,
           info.lanes.size(), where);
    if (sum > info.num_samples) break;  // cannot overflow: each summand is at most 2^40
    sum += shard.num_samples;
  }
  if (sum != info.num_samples)
    fail("feature store", "expected {} samples in the shards, got {} ({})", info.num_samples, sum, where);
  info.complete = fields.flag("complete");
  if (root.contains("source")) info.source = root["source"];
  return info;
}

bool is_store(const std::string& folder) {
  return std::filesystem::exists(std::filesystem::path(folder) / "store.json");
}

StoreInfo read_store_info(const std::string& folder) {
  const std::filesystem::path path = std::filesystem::path(folder) / "store.json";
  if (!is_store(folder))
    fail("feature store",
         "expected a folder with store.json, got none ({}): make one with kiln extract or kiln store import",
         folder);
  constexpr JsonOptions kLimits;
  return parse_store_info(read_input("feature store", path.string(), kLimits.most_bytes), path.string());
}

std::string store_info_text(const StoreInfo& info) {
  nlohmann::ordered_json root;
  root["format"] = kFormatName;
  root["format_version"] = kStoreFormatVersion;
  KILN_WRITE_FIELDS(root, info, complete, num_samples, autoencoder, autoencoder_fingerprint);
  if (!info.autoencoder_path.empty()) root["autoencoder_path"] = info.autoencoder_path;
  KILN_WRITE_FIELDS(root, info, scaling_factor, shift_factor, channels);
  root["lanes"] = nlohmann::ordered_json::array();
  for (const Lane& lane : info.lanes) {
    root["lanes"].push_back({{"height", lane.height}, {"width", lane.width}});
    if (lane.aspect_ratio > 0) root["lanes"].back()["aspect_ratio"] = lane.aspect_ratio;
  }
  KILN_WRITE_FIELDS(root, info, image_size, has_logvar, already_scaled);
  if (info.has_image_size) root["has_image_size"] = true;
  root["num_flips"] = info.num_flips;
  root["dtype"] = dtype_name(info.dtype);
  root["class_names"] = info.class_names;
  root["source"] = info.source;
  root["shards"] = nlohmann::ordered_json::array();
  for (const auto& shard : info.shards) {
    root["shards"].push_back({{"file", shard.file},
                              {"num_samples", shard.num_samples},
                              {"xxh3", shard.xxh3},
                              {"lane", shard.lane}});
    if (!shard.columns_xxh3.empty()) root["shards"].back()["columns_xxh3"] = shard.columns_xxh3;
  }
  // Class names are folder names: bytes that are not UTF-8 become the replacement character.
  return dump_utf8(root, 1) + "\n";
}

}  // namespace kiln
