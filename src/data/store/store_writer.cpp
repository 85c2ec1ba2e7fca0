#include <algorithm>
#include <filesystem>
#include <unordered_set>

#include "core/error.h"
#include "core/files/atomic_file.h"
#include "core/files/entries.h"
#include "core/files/file_lock.h"
#include "core/files/mapped_file.h"
#include "core/files/xxh3.h"
#include "core/text/some_of.h"
#include "data/store/feature_store.h"
#include "data/store/latent_kernels.h"
#include "data/store/sample_log.h"
#include "data/store/store_shard.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMaxShardBytes = int64_t{256} << 20;

// Creates the folder. Throws Error if it holds other things.
void prepare_folder(const std::string& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) fail("feature store", "cannot create {}: {}", folder, error.message());
  if (!is_store(folder) && !fs::is_empty(folder)) {
    // A run killed before its first store.json leaves only that file's partial.
    for (const auto& entry : entries_of(folder)) {
      if (!entry.path().filename().string().starts_with("store.json."))
        fail("feature store",
             "expected an empty folder or a store, got a folder with {:?} ({}): choose another",
             entry.path().filename().string(), folder);
    }
  }
}

// Returns the settings of a store, with those of its source one by one.
nlohmann::json settings_of(StoreInfo info) {
  info.num_samples = 0;
  info.shards.clear();
  info.complete = false;
  info.autoencoder_path.clear();  // the same autoencoder may lie elsewhere now
  auto fields = nlohmann::json::parse(store_info_text(info));
  const nlohmann::json source = fields["source"];
  if (!source.is_object()) return fields;
  fields.erase("source");
  for (const auto& [key, value] : source.items()) fields["source " + key] = value;
  return fields;
}

// Formats a setting for people. `other` is its value in the other store. A missing switch is off.
std::string setting_text(const nlohmann::json& value, const nlohmann::json& other) {
  if (value.is_boolean()) return value.get<bool>() ? "on" : "off";
  if (value.is_null()) return other.is_boolean() ? "off" : "none";
  return value.dump().substr(0, 60);
}

// Lists the settings in which the store in the folder differs from what is asked for.
std::string describe_differences(const StoreInfo& there, StoreInfo asked) {
  // A complete store no longer has the lanes that got no sample.
  const auto is_lost = [&](const Lane& lane) {
    return std::find(there.lanes.begin(), there.lanes.end(), lane) == there.lanes.end();
  };
  if (there.complete && !std::all_of(asked.lanes.begin(), asked.lanes.end(), is_lost))
    std::erase_if(asked.lanes, is_lost);
  nlohmann::json old_fields = settings_of(there), new_fields = settings_of(asked);
  for (const auto& [key, value] : old_fields.items()) new_fields.emplace(key, nullptr);
  std::vector<std::string> differences;
  for (const auto& [key, value] : new_fields.items()) {
    const auto old_value = old_fields.value(key, nlohmann::json());
    if (old_value == value) continue;
    differences.push_back(fmt::format("{} ({} there, {} asked for)", key, setting_text(old_value, value),
                                      setting_text(value, old_value)));
  }
  return some_of(differences);
}

class StoreWriter : public FeatureStoreWriter {
 public:
  StoreWriter(const std::string& folder, const StoreInfo& info, int64_t samples_per_shard)
      : folder_(folder),
        lock_("feature store", folder,
              fmt::format("another process is writing this store ({}): wait for it or choose another folder",
                          folder)) {
    StoreInfo empty = info;
    empty.num_samples = 0;
    empty.shards.clear();
    empty.complete = false;
    info_ = parse_store_info(store_info_text(empty), "the settings of " + folder);
    samples_per_shard_ = std::max(samples_per_shard, int64_t{1});
    if (is_store(folder)) {
      reopen();
    } else {
      write_info();
    }
    count_complete(empty.lanes);
    const std::string log_path = (fs::path(folder) / "unfinished-shard.log").string();
    if (info_.complete) {
      fs::remove(log_path);  // a run killed just before removing the log leaves it
      return;
    }
    log_ = std::make_unique<SampleLog>(log_path);
    log_->recover([this](const SampleLog::Record& record) { return recover(record); });
    num_complete_of_[static_cast<size_t>(lane_)] += columns_.num_samples();
    if (is_full()) write_shard();
    num_complete_ = info_.num_samples + columns_.num_samples();
  }

  int64_t num_complete() const override { return num_complete_; }
  int64_t num_complete_of(int64_t lane) const override { return num_complete_of_[static_cast<size_t>(lane)]; }
  std::string last_name() const override { return last_name_; }

  void add(const Sample& sample) override {
    check(sample);
    narrow(sample.mean, mean_);
    narrow(sample.logvar, logvar_);
    if (columns_.num_samples() > 0 && sample.lane != lane_) write_shard();
    const SampleLog::Record record{info_.num_samples + columns_.num_samples(),
                                   sample.label,
                                   sample.name,
                                   sample.caption,
                                   mean_,
                                   logvar_,
                                   sample.lane,
                                   sample.image_hw};
    log_->append(record);
    append(record);
    if (is_full()) write_shard();
  }

  void finish() override {
    if (info_.complete) return;
    if (columns_.num_samples() > 0) write_shard();
    if (info_.num_samples == 0) fail("feature store", "expected at least one sample, got none ({})", folder_);
    info_.drop_empty_lanes();
    info_.complete = true;
    write_info();
    log_->remove();
  }

 private:
  // Counts the samples of each lane asked for. A complete store may have fewer lanes.
  void count_complete(const std::vector<Lane>& asked) {
    const std::vector<SampleLane> there = info_.sample_lanes();
    for (const Lane& lane : asked) {
      const auto found = std::find(info_.lanes.begin(), info_.lanes.end(), lane) - info_.lanes.begin();
      num_complete_of_.push_back(found < std::ssize(there) ? there[static_cast<size_t>(found)].size() : 0);
    }
  }

  void reopen() {
    const StoreInfo there = read_store_info(folder_);
    const std::string differences = describe_differences(there, info_);
    if (!differences.empty())
      fail("feature store",
           "the folder holds a store of other settings: {} ({}): choose another folder or remove it",
           differences, folder_);
    info_ = there;
    // Reading the names also proves that the shards are there and whole.
    for (const auto& shard : info_.shards) {
      const std::string path = (fs::path(folder_) / shard.file).string();
      const StoreShard opened(open_safetensors(path), info_, shard, path);
      for (int64_t i = 0; i < shard.num_samples; ++i)
        names_.insert(xxh3(std::as_bytes(std::span(opened.name(i)))));
      last_name_ = opened.name(shard.num_samples - 1);
    }
    num_complete_ = info_.num_samples;
  }

  bool recover(const SampleLog::Record& record) {
    if (record.sample != info_.num_samples + columns_.num_samples()) return false;
    if (record.lane < 0 || record.lane >= static_cast<int64_t>(info_.lanes.size())) return false;
    if (columns_.num_samples() > 0 && record.lane != lane_) return false;
    const auto expected = static_cast<size_t>(latent_bytes(record.lane));
    if (record.mean.size() != expected || record.logvar.size() != (info_.has_logvar ? expected : 0))
      return false;
    append(record);
    return true;
  }

  void append(const SampleLog::Record& record) {
    columns_.append(record);
    lane_ = record.lane;
    names_.insert(xxh3(std::as_bytes(std::span(record.name))));
    last_name_ = record.name;
  }

  void check(const Sample& sample) const {
    if (info_.complete)
      fail("feature store",
           "the store is complete with {} samples, {:?} is one more ({}): choose another folder or remove it",
           info_.num_samples, sample.name, folder_);
    if (sample.lane < 0 || sample.lane >= static_cast<int64_t>(info_.lanes.size()))
      throw std::logic_error("feature store: a sample of an unknown lane");
    if (info_.has_image_size && (sample.image_hw[0] < 1 || sample.image_hw[1] < 1))
      throw std::logic_error("feature store: a sample without the size of its picture");
    const auto expected = static_cast<size_t>(info_.num_flips * info_.latent_size(sample.lane));
    if (sample.mean.size() != expected || sample.logvar.size() != (info_.has_logvar ? expected : 0))
      fail("feature store", "expected {} values for sample {:?}, got a mean of {} and a logvar of {}",
           expected, sample.name, sample.mean.size(), sample.logvar.size());
    const auto num_classes = static_cast<int64_t>(info_.class_names.size());
    if (sample.label < -1 || sample.label >= num_classes)
      fail("feature store", "expected a label from -1 to {} for sample {:?}, got {}", num_classes - 1,
           sample.name, sample.label);
    if (names_.contains(xxh3(std::as_bytes(std::span(sample.name)))))
      fail("feature store", "sample {:?} is in the store already ({}): names must be unique", sample.name,
           folder_);
    check_finite(sample, "mean", sample.mean);
    check_finite(sample, "logvar", sample.logvar);
  }

  void check_finite(const Sample& sample, const char* what, const std::vector<float>& values) const {
    const int64_t at = find_nonfinite(values);
    if (at >= 0)
      fail("feature store", "expected finite values, got {} in the {} of sample {:?}", values[at], what,
           sample.name);
    // Beyond fp16's largest number the value would become infinity.
    if (info_.dtype != Dtype::kF16) return;
    const auto too_large =
        std::find_if(values.begin(), values.end(), [](float v) { return std::abs(v) >= 65520.0f; });
    if (too_large != values.end())
      fail("feature store", "{} in the {} of sample {:?} is beyond fp16: give --dtype bf16 or f32",
           *too_large, what, sample.name);
  }

  void narrow(const std::vector<float>& values, std::vector<std::byte>& out) const {
    out.resize(values.size() * dtype_size(info_.dtype));
    latents_from_f32(values, info_.dtype, out.data());
  }

  void write_shard() {
    StoreInfo::Shard shard;
    shard.file = fmt::format("shard-{:05d}.safetensors", info_.shards.size());
    shard.num_samples = columns_.num_samples();
    const std::string path = (fs::path(folder_) / shard.file).string();
    shard.lane = lane_;
    columns_.write(path, info_, info_.lanes[static_cast<size_t>(lane_)]);
    shard.xxh3 = xxh3_hex(MappedFile("feature store", path).bytes());
    shard.columns_xxh3 = columns_.columns_xxh3();
    info_.num_samples += shard.num_samples;
    info_.shards.push_back(std::move(shard));
    write_info();
    columns_.clear();
    log_->clear();
  }

  // Counts the bytes of all flips of a sample's mean.
  int64_t latent_bytes(int64_t lane) const {
    return info_.num_flips * info_.latent_size(lane) * static_cast<int64_t>(dtype_size(info_.dtype));
  }

  bool is_full() const {
    const int64_t sample_bytes = latent_bytes(lane_) * (info_.has_logvar ? 2 : 1);
    const int64_t most = std::clamp(kMaxShardBytes / sample_bytes, int64_t{1}, samples_per_shard_);
    return columns_.num_samples() >= most;
  }

  void write_info() const {
    write_file_atomically("feature store", (fs::path(folder_) / "store.json").string(),
                          store_info_text(info_));
  }

  std::string folder_;
  FileLock lock_;  // two processes never write one store
  StoreInfo info_;
  int64_t lane_ = 0;  // of the shard being filled
  int64_t samples_per_shard_ = 0;
  int64_t num_complete_ = 0;
  std::vector<int64_t> num_complete_of_;  // of each lane asked for
  std::string last_name_;
  ShardColumns columns_;                // the shard being filled
  std::unique_ptr<SampleLog> log_;      // the same on disk; null once complete
  std::unordered_set<uint64_t> names_;  // hashes of all names
  std::vector<std::byte> mean_, logvar_;
};

}  // namespace

std::unique_ptr<FeatureStoreWriter> FeatureStoreWriter::open(const std::string& folder, const StoreInfo& info,
                                                             int64_t samples_per_shard) {
  prepare_folder(folder);
  return std::make_unique<StoreWriter>(folder, info, samples_per_shard);
}

}  // namespace kiln
