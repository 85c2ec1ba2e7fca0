// A picture's pixels as the autoencoder's input.
#pragma once
#include <span>

#include "data/images/images.h"

namespace kiln {

// (3, H, W) in [-1, 1], as torchvision's ToTensor and Normalize(0.5, 0.5) round it; optionally mirrored.
void write_image_values(const Image& image, bool mirrored, std::span<float> out);

}  // namespace kiln
