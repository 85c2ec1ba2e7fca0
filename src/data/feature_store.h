// The feature store: store.json + shard-*.safetensors (docs/feature_store.md). Memory-mapped, torch-free.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "core/dtype.h"

namespace kiln {

// store.json. What a reader must check before it trains on the shards.
struct StoreInfo {
  int format_version = 1;
  std::string autoencoder;              // "autoencoder_kl" | "pixels"
  std::string autoencoder_fingerprint;  // xxh3 of its weights; "" = unknown (imports)
  // Where its file or folder lay; "" = nowhere (pixels, imports). A hint for whoever decodes, to be checked
  // by the fingerprint: no part of what makes two stores the same.
  std::string autoencoder_path;
  double scaling_factor = 1, shift_factor = 0;
  int64_t channels = 0, height = 0, width = 0;  // of a latent
  int64_t image_size = 0;                       // pixels
  bool has_logvar = true;       // false: features are plain latents (pixels, fast-DiT imports)
  bool already_scaled = false;  // latents that hold the scaling factor already (fast-DiT imports)
  int64_t num_flips = 1;        // 2: each image is stored as is and mirrored (--flip both)
  Dtype dtype = Dtype::kF32;    // of mean and logvar: F32, BF16 or F16
  int64_t num_samples = 0;
  std::vector<std::string> class_names;  // empty: no labels
  struct Shard {
    std::string file;
    int64_t num_samples = 0;
    std::string xxh3;  // of the file's bytes, 16 hexadecimal digits
  };
  std::vector<Shard> shards;
  nlohmann::json source;  // where the images came from, for people
  bool complete = false;  // false: the extraction was interrupted, or runs now

  int64_t latent_size() const { return channels * height * width; }  // elements
};

// Checks every field and their sums; does not touch the shards. `where` names the text in messages. Throws
// Error.
StoreInfo parse_store_info(std::string_view text, const std::string& where);
// Reads folder/store.json, of an unfinished store too.
StoreInfo read_store_info(const std::string& folder);
std::string store_info_text(const StoreInfo& info);

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
  // f32 mean/logvar of samples, (ids.size(), C, h, w) each; flip 0 or 1 per sample (1 needs num_flips 2), an
  // empty `flips` is all 0. SIMD convert.
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
    std::vector<float> mean, logvar;  // (flips, C, h, w); logvar empty if !has_logvar
  };
  // Creates the folder, or reopens one that an interrupted run of the same settings left (num_samples, shards
  // and complete are ignored). Throws Error when the folder holds a store of other settings or another
  // process writes it. Shards of large latents hold fewer samples, 256 MiB at most.
  static std::unique_ptr<FeatureStoreWriter> open(const std::string& folder, const StoreInfo& info,
                                                  int64_t samples_per_shard = 4096);
  virtual ~FeatureStoreWriter() = default;
  // Samples kept from an earlier run: the caller skips this many.
  virtual int64_t num_complete() const = 0;
  // The name of the last of them, "" if none (a caller that leaves out broken images continues behind it).
  virtual std::string last_name() const = 0;
  // Refuses by name (Error): NaN or infinity, wrong size, unknown label, a name that is there already.
  virtual void add(const Sample& sample) = 0;
  // Writes the rest and marks the store complete. On a store that is complete already: nothing.
  virtual void finish() = 0;
};

}  // namespace kiln
