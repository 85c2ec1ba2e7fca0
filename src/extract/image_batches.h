// Batches of images that are decoded and encoded while training (kiln train --data IMAGES --autoencoder
// PATH).
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>

#include "data/images/run_pictures.h"
#include "data/loader/batches.h"
#include "extract/encoded_text.h"
#include "extract/picture_lanes.h"
#include "models/autoencoders/autoencoder.h"

namespace kiln {

struct Pictures {
  std::shared_ptr<const RunPictures> images;
  std::shared_ptr<const PictureLanes> lanes;  // of `images`
};

// Returns the stream of a store that was extracted from these pictures with --flip both: the same order and
// the same draws. Sample ids are those of the data set. Worker threads decode ahead. next() encodes on
// `device`, where the autoencoder's weights are, `images_at_once` images at a time (0: the whole batch),
// which changes only the rounding. `text` has the captions of the same pictures: the threads make their ids,
// next() encodes them; null: batches have none. A picture that decoding shows to be broken is left out: at
// its position stands, with its own label and caption, the one that comes next in the lane. (The store has
// fewer samples then, and its stream is another.) next() throws Error naming a picture that cannot be read.
std::unique_ptr<BatchSource> image_batches(const Pictures& pictures,
                                           std::shared_ptr<const Autoencoder> autoencoder, at::Device device,
                                           const BatchOptions& options, int64_t images_at_once = 0,
                                           std::shared_ptr<const EncodedText> text = nullptr);

// Encodes this number of blank pictures for a lane of latents and drops the result.
void rehearse_encoding(const Autoencoder& autoencoder, const Lane& lane, int64_t pictures, at::Device device);

}  // namespace kiln
