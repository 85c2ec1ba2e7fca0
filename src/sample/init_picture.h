// The size of the pictures of `kiln sample`, and the picture that they start from.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "data/images/images.h"
#include "models/autoencoders/autoencoder.h"
#include "sample/sample_options.h"
#include "sample/sample_source.h"

namespace kiln {

struct LatentSides {
  int64_t height = 0, width = 0;
};

// Returns the pictures' sides in latents: from --height and --width, from --aspect-ratio, else from the
// picture `init` that they start from (may be null), else the model's own. Throws Error for sides that the
// model does not draw.
LatentSides latent_sides(const SampleCommand& command, const DrawingSource& source, const Image* init);

struct InitPicture {
  Image image;
  std::string fingerprint;  // size and hash of its pixels
};

// Reads the picture at `path`. Throws Error naming --image: the file is missing or not a picture.
InitPicture read_init_picture(const std::string& path);

// Returns SampleOptions::start_from. The picture is encoded once, resized to cover the sides and cropped from
// the centre if it has another size. If the autoencoder gives a distribution, each image draws its own
// latents by (seed, image). Throws Error: the autoencoder has no encoder.
std::function<at::Tensor(const std::vector<int64_t>& images)> start_from(const InitPicture& picture,
                                                                         const Autoencoder& autoencoder,
                                                                         const LatentSides& sides,
                                                                         uint64_t seed, at::Device device);

}  // namespace kiln
