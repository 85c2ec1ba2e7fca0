// Batches of images that are decoded and encoded while training (kiln train --data IMAGES --autoencoder
// PATH).
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>

#include "data/images/image_dataset.h"
#include "data/loader/batches.h"
#include "extract/encoded_text.h"
#include "models/autoencoders/autoencoder.h"

namespace kiln {

// The stream of a store that was extracted from these images with --flip both: the same order, the same
// draws. Worker threads decode ahead; next() encodes, on `device`, where the autoencoder's weights are, so
// many images at once (0: the whole batch), which changes no more than rounding.
// `text`: the captions of the same pictures, encoded likewise, whose ids the threads make; null: batches have
// none. next() throws Error naming a picture that is broken or too small for `crop`: the stream could not be
// that of a store that left it out.
std::unique_ptr<BatchSource> image_batches(std::shared_ptr<const ImageDataset> dataset,
                                           std::shared_ptr<const Autoencoder> autoencoder, at::Device device,
                                           const Crop& crop, const BatchOptions& options,
                                           int64_t images_at_once = 0,
                                           std::shared_ptr<const EncodedText> text = nullptr);

// Throws Error unless the autoencoder takes images of this size.
void check_image_size(const Autoencoder& autoencoder, int64_t image_size);

}  // namespace kiln
