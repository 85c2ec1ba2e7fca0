#include "models/denoisers/sana_family.h"

#include "models/denoisers/sana.h"
#include "models/denoisers/sana_weights.h"

namespace kiln {

Family sana_family() {
  using nlohmann::json;
  return {.name = "sana",
          .presets = sana_presets,
          .resolve = [](const json& config) { return to_json(parse_sana_config(config)); },
          .complete = complete_sana_config,
          .fit = fit_sana_config,
          .build = [](const json& config,
                      const BuildOptions& options) { return build_sana(parse_sana_config(config), options); },
          .recognise = recognise_sana,
          .formats = {sana_diffusers_format()},
          .file_keys = {sana_file_keys()},
          .latents = {.channels = 32, .downsample = 32},
          .published = {},
          .calibration = {{384, 12, 6, 1, 512, 4}, {1152, 36, 2, 1, 512, 4}}};
}

}  // namespace kiln
