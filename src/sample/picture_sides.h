// How large the pictures of `kiln sample` are.
#pragma once
#include <cstdint>

#include "data/images/images.h"
#include "sample/sample_options.h"
#include "sample/sample_source.h"

namespace kiln {

struct LatentSides {
  int64_t height = 0, width = 0;
};

// The pictures' sides in latents: of --height and --width, of --aspect-ratio, of the picture `init` that they
// start from where none of these is given, or the model's own. Throws Error for sides that the model does not
// draw. `init`: may be null.
LatentSides latent_sides(const SampleCommand& command, const SampleSource& source, const Image* init);

}  // namespace kiln
