// The feature stores of a run and what its options choose from them; the samples of a pass over any data.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "data/store/sample_order.h"
#include "data/text_store/text_store.h"
#include "extract/image_batches.h"
#include "train/dataset/data_source.h"

namespace kiln {

// Returns the side in pixels of the pictures of a run without --image-size: the store's own, else those that
// the model is made for. Throws Error.
int64_t own_image_size(const TrainOptions& options);

// Returns the text store of each part, for a model of this name. Throws Error: a part has none, or has
// captions of other samples or encoders than the first, or without padding that the model attends to.
std::vector<std::string> text_folders_of(const StoredData& data, const std::string& model, bool pads_text);

// Returns a name for the content of a run's stores. A run resumes only on the same content. `text_folders`:
// as above; empty: no captions are taken.
std::string identity_of(const StoredData& data, const std::vector<std::string>& text_folders);
// Returns the part of an identity that names captions and their encoder. It begins with "; captions ".
std::string identity_of(const TextStoreInfo& text);
// Returns how many parts of each store make up `identity`; the stores may have grown since. Returns nothing
// if the stores never had that identity.
std::optional<std::vector<int64_t>> parts_of_identity(const TrainOptions& options,
                                                      const std::string& identity);

// Returns the samples of a split of the data if `share` of them is held out. Empty: all belong to training.
// Throws Error: the split has none, or a lane has none left to train on.
std::vector<SampleLane> split_of(double share, const FeatureStore& store, Split split);
std::vector<SampleLane> split_of(double share, const Pictures& pictures, Split split);

// Opens the pictures of --validation-data and fits them to the sizes of --data's pictures, `trained`. If
// those are null, as where --data is a store, they are fitted to the square. `held_out`: held_out_options().
// Throws as open_pictures() does.
Pictures open_validation_pictures(DataOptions held_out, const Pictures& trained, int64_t downsample);

// Returns the steps that `epochs` passes over `samples` take, rounded up.
int64_t steps_of_epochs(double epochs, int64_t samples, int64_t global_batch);
// Returns the samples of a pass over the data of the options; 0: endless. Throws Error: no data there.
int64_t samples_of(const TrainOptions& options);
// Returns how many samples a validation takes: --validation-images, or all that there are. `trained`:
// --data's pictures, if they are open. Throws Error: no data there.
int64_t validation_samples(const TrainOptions& options, Pictures trained = {});

// Returns the options of a run without stages, with --epochs turned into --max-steps. `num_samples` is the
// length of a pass; 0: that of the options' data. Throws Error: the data are endless.
TrainOptions with_length(TrainOptions options, int64_t num_samples = 0);

}  // namespace kiln
