// The feature store: store.json + shard-*.safetensors (docs/feature_store.md). Memory-mapped, torch-free.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "data/store/store_info.h"

namespace kiln {

// The samples of a store that came from one place.
struct SampleSource {
  std::string name;  // shown to people
  int64_t first = 0, count = 0;
};

// A store and its folder.
struct StorePart {
  std::string folder;
  StoreInfo info;
};
// Parts whose samples follow each other as those of one store.
struct JoinedParts {
  StoreInfo info;  // of all of them; its shards are those of the parts in order
  std::vector<StorePart> parts;
  std::vector<SampleLane> lanes;
  std::vector<SampleSource> sources;
};

// Read access to a feature store. Sample i has mean (flips, C, h, w), logvar likewise, a label, a caption and
// a name. Thread-safe.
class FeatureStore {
 public:
  // Throws Error: not a store, unfinished, newer version, missing or truncated shard. `verify` also checks
  // every checksum, and the values for NaN.
  static std::shared_ptr<FeatureStore> open(const std::string& folder, bool verify = false);
  static std::shared_ptr<FeatureStore> join(JoinedParts parts);
  virtual ~FeatureStore() = default;
  const StoreInfo& info() const { return info_; }
  int64_t size() const { return info_.num_samples; }
  // The samples of each lane, in the order of info().lanes, with their weights.
  virtual std::vector<SampleLane> sample_lanes() const { return info_.sample_lanes(); }
  // The sources of a store that joins several; empty for any other store.
  virtual std::vector<SampleSource> sources() const { return {}; }
  // Read the mean or logvar of samples of one lane as f32 (ids.size(), C, h, w), converted with SIMD. `flips`
  // has 0 or 1 per sample (1 needs num_flips 2); empty: all are 0. The first read of a sample checks its
  // bytes and throws Error naming a sample whose checksum has changed since it was written.
  virtual void read_mean(std::span<const int64_t> ids, std::span<const uint8_t> flips,
                         std::span<float> out) const = 0;
  virtual void read_logvar(std::span<const int64_t> ids, std::span<const uint8_t> flips,
                           std::span<float> out) const = 0;
  // Starts reading samples from disk that are needed soon.
  virtual void prefetch(std::span<const int64_t> ids) const = 0;
  virtual int64_t label(int64_t id) const = 0;  // -1 = none
  virtual std::string caption(int64_t id) const = 0;
  virtual std::string sample_name(int64_t id) const = 0;
  virtual int64_t lane(int64_t id) const = 0;  // index into info().lanes
  // Height and width of the original picture after it was turned; {0, 0} = unknown, which never happens if
  // info().has_image_size.
  virtual std::array<int64_t, 2> image_hw(int64_t id) const = 0;

 protected:
  StoreInfo info_;
};

// Returns everything that is wrong with a store's shards, one line each naming the shard or sample: missing,
// truncated, checksum, wrong shapes, NaN. Empty if all is well. Calls progress(shards done, shards) after
// each shard. Throws Error when store.json itself is unusable.
std::vector<std::string> find_store_problems(const std::string& folder,
                                             const std::function<void(int64_t, int64_t)>& progress = {});

// Write access to a feature store. Samples are appended to a log as they come, so that a killed extraction
// loses at most the current sample. Full shards are written to a temporary name, fsynced and renamed.
// store.json is rewritten after every shard.
class FeatureStoreWriter {
 public:
  struct Sample {
    std::string name, caption;
    int64_t label = -1;
    std::vector<float> mean, logvar;    // (flips, C, h, w); logvar empty if !has_logvar
    int64_t lane = 0;                   // a change of lane begins a new shard: add lane by lane
    std::array<int64_t, 2> image_hw{};  // at least 1 x 1 if has_image_size
  };
  // Creates the folder, or reopens one that an interrupted run of the same settings left. The num_samples,
  // shards and complete of `info` are ignored. Throws Error when the folder holds a store of other settings
  // or another process writes it. Shards of large latents hold fewer samples, so that a shard has 256 MiB at
  // most.
  static std::unique_ptr<FeatureStoreWriter> open(const std::string& folder, const StoreInfo& info,
                                                  int64_t samples_per_shard = 4096);
  virtual ~FeatureStoreWriter() = default;
  // Samples kept from an earlier run: the caller skips this many.
  virtual int64_t num_complete() const = 0;
  // Those of them that belong to a lane, which is an index into the lanes given to open().
  virtual int64_t num_complete_of(int64_t lane) const = 0;
  // The name of the last of them, "" if none (a caller that leaves out broken images continues behind it).
  virtual std::string last_name() const = 0;
  // Adds a sample. Throws Error naming it: NaN or infinity, wrong size, unknown label, a name that the store
  // already has.
  virtual void add(const Sample& sample) = 0;
  // Writes the rest and marks the store complete, without the lanes that got no sample. Does nothing if the
  // store is complete already.
  virtual void finish() = 0;
};

}  // namespace kiln
