// Draws pictures with trained weights: `kiln sample`. Needs no torch.
#pragma once
#include <optional>

#include "kiln/options.h"

namespace kiln::v0 {

// Empty and 0: as the weights say, or as their model is published.
struct SampleRequest {
  std::string weights;      // a weights file, a diffusers folder, a run or a checkpoint
  std::string out;          // folder of PNG files; drawing again draws what is missing
  std::string autoencoder;  // path or "pixels"
  int64_t num_images = 8;
  std::vector<std::string> classes, prompts;  // drawn in turn
  std::string sampler;
  int64_t num_sampling_steps = 0;
  std::optional<double> cfg_scale;  // 1: no guidance
  uint64_t seed = 0;
  std::string device = "auto", compute_dtype = "f32";
};

void sample(const SampleRequest& request);

}  // namespace kiln::v0
