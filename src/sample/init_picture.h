// The picture that `kiln sample --image` starts from.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "data/images/images.h"
#include "models/autoencoders/autoencoder.h"
#include "sample/picture_sides.h"

namespace kiln {

struct InitPicture {
  Image image;
  std::string fingerprint;  // of its pixels
};

// Throws Error naming --image: the file is not there or no picture.
InitPicture read_init_picture(const std::string& path);

// SampleOptions::start_from: the picture, where its sides are others resized to cover them and cropped from
// the centre, through the autoencoder, once. Where that gives a distribution, each image draws its own
// latents by (seed, image). Throws Error: the autoencoder has no encoder.
std::function<at::Tensor(const std::vector<int64_t>& images)> start_from(const InitPicture& picture,
                                                                         const Autoencoder& autoencoder,
                                                                         const LatentSides& sides,
                                                                         uint64_t seed, at::Device device);

}  // namespace kiln
