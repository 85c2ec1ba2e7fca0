// Pictures that a run encodes while it trains, and the sizes that they are brought to.
#pragma once
#include <string>
#include <vector>

#include "extract/image_batches.h"
#include "run/train_options.h"

namespace kiln {

// Opens the pictures at `path`, which the options bring to a square or to buckets. `downsample` is how many
// pixels the autoencoder turns into one; it may be 1 if only the number of pictures matters. `among` are the
// only buckets allowed, if those of other pictures are to be used. `of`: RunPictures::Options::of. Throws
// Error saying what to do: sizes that do not fit the autoencoder or --image-size, or no picture that can be
// used.
Pictures open_pictures(const DataOptions& options, const std::string& path, int64_t downsample,
                       const std::vector<Bucket>& among = {}, const char* of = "--data");

// Returns the lanes of latents for pictures that do not exist yet: all lanes that the options name.
std::vector<Lane> planned_lanes(const DataOptions& options, int64_t downsample);

// Returns notes for the user, one line each: pictures that are left out, and what the data set does not take.
// Looks at every file of some data sets.
std::vector<std::string> picture_notes(const Pictures& pictures, const std::string& path);

}  // namespace kiln
