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

// Samples of a store that came from one place.
struct SampleSource {
  std::string name;  // for people
  int64_t first = 0, count = 0;
};

// Read access. Sample i has mean (flips, C, h, w), logvar likewise, a label, a caption and a name.
// Thread-safe.
class FeatureStore {
 public:
  // Throws Error: not a store, unfinished, newer version, missing or truncated shard. `verify`: also every
  // checksum and NaN.
  static std::shared_ptr<FeatureStore> open(const std::string& folder, bool verify = false);
  virtual ~FeatureStore() = default;
  const StoreInfo& info() const { return info_; }
  int64_t size() const { return info_.num_samples; }
  // The samples of each lane, in the order of info().lanes, as often as a pass takes them.
  virtual std::vector<SampleLane> sample_lanes() const { return info_.sample_lanes(); }
  // Several of a store that joins others; else none.
  virtual std::vector<SampleSource> sources() const { return {}; }
  // f32 mean/logvar of samples of one lane, (ids.size(), C, h, w) each; flip 0 or 1 per sample (1 needs
  // num_flips 2), an empty `flips` is all 0. SIMD convert. The first read of a sample checks its bytes:
  // throws Error naming a sample whose checksum is another than when it was written.
  virtual void read_mean(std::span<const int64_t> ids, std::span<const uint8_t> flips,
                         std::span<float> out) const = 0;
  virtual void read_logvar(std::span<const int64_t> ids, std::span<const uint8_t> flips,
                           std::span<float> out) const = 0;
  // The unmirrored means as bf16, without a detour (throughput benchmark, frozen features).
  virtual void read_mean_bf16(std::span<const int64_t> ids, std::span<uint16_t> out) const = 0;
  // A hint: these samples are read soon (starts reading them from disk).
  virtual void prefetch(std::span<const int64_t> ids) const = 0;
  virtual int64_t label(int64_t id) const = 0;  // -1 = none
  virtual std::string caption(int64_t id) const = 0;
  virtual std::string sample_name(int64_t id) const = 0;
  virtual int64_t lane(int64_t id) const = 0;  // index into info().lanes
  // Height and width of the original picture, as seen; {0, 0} = unknown, which info().has_image_size
  // excludes.
  virtual std::array<int64_t, 2> image_hw(int64_t id) const = 0;

 protected:
  StoreInfo info_;
};

// Everything wrong with a store's shards, one line each naming the shard or sample: missing, truncated,
// checksum, wrong shapes, NaN. Empty: all is well. Throws Error when store.json itself is unusable.
// `progress(shards done, shards)` after each shard.
std::vector<std::string> find_store_problems(const std::string& folder,
                                             const std::function<void(int64_t, int64_t)>& progress = {});

// Write access. Samples are appended to a log as they come, so that a killed extraction loses at most the
// sample in hand; full shards are written to a temporary name, fsynced, renamed; store.json is rewritten
// after every shard.
class FeatureStoreWriter {
 public:
  struct Sample {
    std::string name, caption;
    int64_t label = -1;
    std::vector<float> mean, logvar;    // (flips, C, h, w); logvar empty if !has_logvar
    int64_t lane = 0;                   // a change of lane begins a new shard: add lane by lane
    std::array<int64_t, 2> image_hw{};  // at least 1 x 1 if has_image_size
  };
  // Creates the folder, or reopens one that an interrupted run of the same settings left (num_samples, shards
  // and complete are ignored). Throws Error when the folder holds a store of other settings or another
  // process writes it. Shards of large latents hold fewer samples, 256 MiB at most.
  static std::unique_ptr<FeatureStoreWriter> open(const std::string& folder, const StoreInfo& info,
                                                  int64_t samples_per_shard = 4096);
  virtual ~FeatureStoreWriter() = default;
  // Samples kept from an earlier run: the caller skips this many.
  virtual int64_t num_complete() const = 0;
  // Those of them that are of this lane, an index into the lanes given to open().
  virtual int64_t num_complete_of(int64_t lane) const = 0;
  // The name of the last of them, "" if none (a caller that leaves out broken images continues behind it).
  virtual std::string last_name() const = 0;
  // Refuses by name (Error): NaN or infinity, wrong size, unknown label, a name that is there already.
  virtual void add(const Sample& sample) = 0;
  // Writes the rest and marks the store complete, without the lanes that got no sample. On a store that is
  // complete already: nothing.
  virtual void finish() = 0;
};

}  // namespace kiln
