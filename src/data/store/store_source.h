// The feature stores that a run trains on, each with the parts that were appended to it. Torch-free.
#pragma once
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "data/store/feature_store.h"

namespace kiln {

// kiln extract --append adds a part to a store: a folder within it that is a complete store of its own. The
// first part is the store of the first extraction. Parts never change once they are complete, so the first
// parts of a longer store are what the store was before.

// Returns the folders of a store's parts in order; the first is the store's own. Leaves out a part that is
// not complete yet, and all after it.
std::vector<std::string> store_parts(const std::string& store);
// Returns the folder of part `number`, from 1 on, that is appended to a store.
std::string appended_part_folder(const std::string& store, int64_t number);

// A store to train on.
struct StoreSource {
  std::string store;
  double weight = 1;      // how often its samples come
  int64_t num_parts = 0;  // only the first ones of its parts; 0: all

  std::vector<std::string> parts() const;  // their folders; throws Error: there are fewer
};

// Opens the parts of all sources as one store, in which a source's samples follow each other. A single part
// is opened as it is. Throws Error naming the part that does not fit the first one: another autoencoder, size
// of pictures, flips or class names.
std::shared_ptr<FeatureStore> open_sources(std::span<const StoreSource> sources);
// Returns the info() of that store. Reads only store.json files. The names of the shards are of no use.
StoreInfo read_sources_info(std::span<const StoreSource> sources);
// Returns the number of samples of a pass, with weights.
int64_t samples_per_epoch(std::span<const StoreSource> sources);

// Throws Error unless samples of both stores can be trained on together. Messages name their folders.
void require_same_features(const StoreInfo& first, const std::string& first_name, const StoreInfo& other,
                           const std::string& other_name);

}  // namespace kiln
