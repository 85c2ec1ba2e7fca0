// The feature stores of a run: what its options choose of them, and what a model is told of their samples.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "data/store/sample_split.h"
#include "data/store/store_source.h"
#include "data/text_store/text_store.h"
#include "extract/image_batches.h"
#include "run/train_options.h"

namespace kiln {

// --data and --more-data.
std::vector<StoreSource> sources_of(const TrainOptions& options);
// Whether --data is a feature store.
bool has_store(const TrainOptions& options);
// Throws Error unless --data is a feature store, or pictures with an autoencoder.
void require_data(const TrainOptions& options);

// What a model is told of the samples of a run's stores. Throws Error saying what to do: no store, another
// image size, more classes than --num-classes, captions that the model takes and a store lacks or has of
// another encoder.
struct StoredSamples {
  StoreInfo info{};  // of all of them together
  DataShape shape{};
  std::vector<std::string> text_folders{};  // of each part; empty: the model takes no captions
};
StoredSamples describe_stores(const TrainOptions& options);

// Names the content of a run's stores: it resumes on the same one only. `text_folders`: as above.
std::string identity_of(const TrainOptions& options, const std::vector<std::string>& text_folders);
// The part of an identity that names captions and what encodes them; it begins with "; captions ".
std::string identity_of(const TextStoreInfo& text);
// How many parts of each store have the identity, where they have grown since; nothing when they never had
// it.
std::optional<std::vector<int64_t>> parts_of_identity(const TrainOptions& options,
                                                      const std::string& identity);

// The samples of a split of the data where --validation-share divides them; empty: all belong to training.
// Throws Error: the split has none, or none of a lane that is trained on.
std::vector<SampleLane> split_of(const TrainOptions& options, const FeatureStore& store, Split split);
std::vector<SampleLane> split_of(const TrainOptions& options, const Pictures& pictures, Split split);

// Steps that so many passes over `samples` take, so that each sample has come as often.
int64_t steps_of_epochs(double epochs, int64_t samples, int64_t global_batch);
// The samples of a pass over the data of the options; 0: endless. Throws Error: no data there.
int64_t samples_of(const TrainOptions& options);

// The options of a run without stages with --epochs as --max-steps. `num_samples`: of a pass; 0: those of its
// data. Throws Error: the data are endless.
TrainOptions with_length(TrainOptions options, int64_t num_samples = 0);

}  // namespace kiln
