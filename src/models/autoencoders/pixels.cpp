#include "models/autoencoders/pixels.h"

namespace kiln {
Pixels::Pixels() {
  name = "pixels";
  fingerprint = "none";
  latent_channels = 3;
  downsample = 1;
  has_posterior = false;
}

}  // namespace kiln
