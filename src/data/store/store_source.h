// What a run trains on: feature stores together, each with all that it has grown by. Torch-free.
#pragma once
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "data/store/feature_store.h"

namespace kiln {

// A store that kiln extract --append has made longer is the store of the first extraction and, in folders
// within it, one for each that was appended: complete stores in their own right, which nothing changes any
// more. The first parts of a store are therefore what the store was.

// The folders of a store's parts in their order, its own first. A part that is not complete yet is left out,
// with all after it.
std::vector<std::string> store_parts(const std::string& store);
// The folder of part `number`, from 1 on, that is appended to a store.
std::string appended_part_folder(const std::string& store, int64_t number);

// Samples to train on.
struct StoreSource {
  std::string store;
  double weight = 1;      // how often they come
  int64_t num_parts = 0;  // the first ones of its parts; 0: all

  std::vector<std::string> parts() const;  // folders. Throws Error: there are fewer
};

// The parts of all sources joined to one store, in which a source's samples follow each other. A single part
// is opened as it is. Throws Error naming the part that does not fit the first one: another autoencoder, size
// of pictures, flips or class names.
std::shared_ptr<FeatureStore> open_sources(std::span<const StoreSource> sources);
// What it will say of itself, from store.json alone; its shards' names are of no use.
StoreInfo read_sources_info(std::span<const StoreSource> sources);
// The samples of a pass, weights counted.
int64_t samples_per_epoch(std::span<const StoreSource> sources);

// Throws Error unless samples of both can be trained on together. The names are of folders, for messages.
void require_same_features(const StoreInfo& first, const std::string& first_name, const StoreInfo& other,
                           const std::string& other_name);

}  // namespace kiln
