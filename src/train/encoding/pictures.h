// Pictures that a run encodes on the way, and what it brings them to.
#pragma once
#include <string>
#include <vector>

#include "extract/image_batches.h"
#include "run/train_options.h"

namespace kiln {

// The pictures at `path`, as the options bring them to a square or to buckets. `downsample`: pixels that the
// autoencoder makes one; 1 where only their number counts. `among`: the buckets that there are, where those
// of other pictures are taken. Throws Error saying what to do: sizes that do not fit the autoencoder or
// --image-size, or no picture that can be used.
Pictures open_pictures(const TrainOptions& options, const std::string& path, int64_t downsample,
                       const std::vector<Bucket>& among = {});

// The lanes of latents of pictures that are not there yet: all that the options name.
std::vector<Lane> planned_lanes(const TrainOptions& options, int64_t downsample);

// What whoever trains on them should know, one line each: pictures that are left out.
std::vector<std::string> picture_notes(const Pictures& pictures, const std::string& path);

}  // namespace kiln
