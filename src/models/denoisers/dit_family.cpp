#include "models/denoisers/dit_family.h"

#include "models/denoisers/dit.h"
#include "models/denoisers/dit_diffusers.h"

namespace kiln {

Family dit_family() {
  return {.name = "dit",
          .presets = dit_presets,
          .resolve = [](const nlohmann::json& config) { return to_json(parse_dit_config(config)); },
          .complete = complete_dit_config,
          .fit = fit_dit_config,
          .build = [](const nlohmann::json& config,
                      const BuildOptions& options) { return build_dit(parse_dit_config(config), options); },
          .recognise = recognise_dit,
          .formats = {dit_diffusers_format()},
          .published = {{"DiT-XL/2", 256, 256, 1e-4, 7'000'000, "DiT-XL/2's published 7M steps"},
                        {"DiT-XL/2", 512, 256, 1e-4, 3'000'000, "DiT-XL/2's published 3M steps"},
                        {"DiT-", 0, 256, 1e-4, 400'000, "DiT's 400K steps"}},
          // Every published width with many and with few rows, 16 to 1,024 tokens; short batches, so that a
          // step takes a fraction of a second, and as many blocks as it takes for a step to fall out of the
          // caches, as a whole model's does: what a backward reads was written long before. What matters most
          // comes first, for where time runs out.
          .calibration = {{384, 6, 6, 2, 256, 4},
                          {768, 12, 3, 4, 256, 16},
                          {1152, 16, 2, 8, 256, 12},
                          {384, 6, 6, 8, 256, 48},
                          {384, 6, 4, 2, 512, 2},
                          {1024, 16, 2, 4, 256, 6},
                          {384, 6, 4, 4, 256, 48},
                          {768, 12, 3, 8, 256, 10},
                          {768, 12, 3, 2, 256, 2},
                          {384, 6, 4, 4, 256, 16, 8},
                          {768, 12, 2, 8, 256, 48},
                          {384, 6, 6, 2, 256, 12},
                          {1152, 16, 2, 2, 256, 2},
                          {768, 12, 2, 4, 256, 6},
                          {1024, 16, 2, 2, 256, 2},
                          {1152, 16, 2, 4, 256, 8},
                          {768, 12, 2, 2, 256, 8},
                          {192, 3, 6, 4, 256, 32}}};
}

}  // namespace kiln
