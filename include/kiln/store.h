// Reads feature stores, which `kiln extract` writes (docs/feature_store.md). Needs no torch.
#pragma once
#include <memory>

#include "kiln/options.h"

namespace kiln {
class FeatureStore;
}

namespace kiln::v0 {

// A store with all complete parts that were appended to it, mapped into memory. Thread-safe.
class Store {
 public:
  static Store open(const std::string& folder);

  int64_t size() const;  // samples
  struct Shape {
    int64_t channels = 0, height = 0, width = 0;  // of latents
  };
  Shape shape(int64_t index) const;
  // Returns the latents of a sample as encoded, (channels, height, width): a model sees (latent - shift) *
  // scaling. The first read of a sample compares its checksum. `mirrored` needs a store of two flips.
  std::vector<float> mean(int64_t index, bool mirrored = false) const;
  std::vector<float> logvar(int64_t index, bool mirrored = false) const;  // empty: it has plain latents
  int64_t label(int64_t index) const;                                     // -1: none
  std::string name(int64_t index) const;
  std::string caption(int64_t index) const;  // empty: none
  double scaling_factor() const;             // 1 in a store of scaled latents (fast-DiT's), whose shift is 0
  double shift_factor() const;
  std::vector<std::string> class_names() const;

 private:
  void check(int64_t index) const;
  std::shared_ptr<const FeatureStore> store_;
};

}  // namespace kiln::v0
