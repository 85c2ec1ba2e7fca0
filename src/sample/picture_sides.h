// The size of the pictures of `kiln sample`.
#pragma once
#include <cstdint>

#include "data/images/images.h"
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

}  // namespace kiln
