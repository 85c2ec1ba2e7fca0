// The feature store: store.json + shard-*.safetensors (docs/feature_store.md). Memory-mapped, torch-free.
#pragma once
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"

namespace kiln {

// store.json. What a reader must check before it trains on the shards.
struct StoreInfo {
  int format_version = 1;
  std::string autoencoder;              // "autoencoder_kl" | "pixels"
  std::string autoencoder_fingerprint;  // xxh3 of its weights
  double scaling_factor = 1, shift_factor = 0;
  int64_t channels = 0, height = 0, width = 0;  // of a latent
  int64_t image_size = 0;                       // pixels
  bool has_logvar = true;               // false: features are plain latents (pixels, fast-DiT imports)
  bool already_scaled = false;          // imported latents that hold the scaling factor already
  int64_t num_flips = 1;                // 2: each image is stored as is and mirrored (--flip both)
  Dtype dtype = Dtype::kF32;
  int64_t num_samples = 0;
  std::vector<std::string> class_names; // empty: no labels
  struct Shard { std::string file; int64_t num_samples = 0; std::string xxh3; };
  std::vector<Shard> shards;
  nlohmann::json source;                // where the images came from, for people
};

// Read access. Sample i has mean (flips, C, h, w), logvar likewise, a label, a caption and an id.
class FeatureStore {
 public:
  // Throws Error: not a store, wrong version, missing or truncated shard. `verify`: also every checksum and NaN.
  static std::shared_ptr<FeatureStore> open(const std::string& folder, bool verify = false);
  virtual ~FeatureStore() = default;
  const StoreInfo& info() const { return info_; }
  int64_t size() const { return info_.num_samples; }
  // f32 mean/logvar of samples, (ids.size(), C, h, w) each; flip 0 or 1 per sample (needs num_flips 2). SIMD convert.
  virtual void read_mean(std::span<const int64_t> ids, std::span<const uint8_t> flips, std::span<float> out) const = 0;
  virtual void read_logvar(std::span<const int64_t> ids, std::span<const uint8_t> flips, std::span<float> out) const = 0;
  // The same means as bf16, without a detour (throughput benchmark, frozen features).
  virtual void read_mean_bf16(std::span<const int64_t> ids, std::span<uint16_t> out) const = 0;
  virtual int64_t label(int64_t id) const = 0;
  virtual std::string caption(int64_t id) const = 0;
  virtual std::string sample_name(int64_t id) const = 0;

 protected:
  StoreInfo info_;
};

// Write access: shards are written to a temporary name, fsynced, renamed; store.json last (and after every shard, so
// that an interrupted extraction continues behind its last complete shard).
class FeatureStoreWriter {
 public:
  struct Sample {
    std::string name, caption;
    int64_t label = -1;
    std::vector<float> mean, logvar;  // (flips, C, h, w); logvar empty if !has_logvar
  };
  // Creates the folder, or reopens one that an interrupted run of the same settings left. Throws Error when the
  // folder holds a store of other settings.
  static std::unique_ptr<FeatureStoreWriter> open(const std::string& folder, const StoreInfo& info,
                                                  int64_t samples_per_shard = 4096);
  virtual ~FeatureStoreWriter() = default;
  // Samples already in complete shards: the caller skips this many.
  virtual int64_t num_complete() const = 0;
  // Refuses NaN/inf by name (Error).
  virtual void add(const Sample& sample) = 0;
  virtual void finish() = 0;
};

}  // namespace kiln
