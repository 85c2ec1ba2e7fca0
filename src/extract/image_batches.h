// Batches of images that are decoded and encoded while training (kiln train --data IMAGES --autoencoder
// PATH).
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>

#include "data/images/image_dataset.h"
#include "data/loader/batches.h"
#include "extract/encoded_text.h"
#include "extract/picture_lanes.h"
#include "models/autoencoders/autoencoder.h"

namespace kiln {

struct Pictures {
  std::shared_ptr<const ImageDataset> images;
  std::shared_ptr<const PictureLanes> lanes;  // of `images`
};

// The stream of a store that was extracted from these pictures with --flip both: the same order, the same
// draws; sample ids are the data set's. Worker threads decode ahead; next() encodes, on `device`, where the
// autoencoder's weights are, so many images at once (0: the whole batch), which changes no more than
// rounding.
// `text`: the captions of the same pictures, encoded likewise, whose ids the threads make; null: batches have
// none. next() throws Error naming a picture of a lane that is broken or too small: the stream could not be
// that of a store that left it out.
std::unique_ptr<BatchSource> image_batches(const Pictures& pictures,
                                           std::shared_ptr<const Autoencoder> autoencoder, at::Device device,
                                           const BatchOptions& options, int64_t images_at_once = 0,
                                           std::shared_ptr<const EncodedText> text = nullptr);

// Encodes so many blank pictures of a lane of latents and drops the result.
void rehearse_encoding(const Autoencoder& autoencoder, const Lane& lane, int64_t pictures, at::Device device);

}  // namespace kiln
