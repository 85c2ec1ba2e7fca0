#include "models/denoisers/families.h"
#include "models/denoisers/sana/sana.h"

namespace kiln {

namespace {
constexpr const char* kConcepts = "begins to learn concepts, as a guide says";
}  // namespace

Family sana_family() {
  return {
      .name = "sana",
      .presets = sana_presets,
      .resolve = resolve_with<parse_sana_config>,
      .complete = complete_sana_config,
      .fit = fit_sana_config,
      .build = build_with<parse_sana_config, build_sana>,
      .recognise = recognise_sana,
      .formats = {sana_diffusers_format()},
      .file_keys = {sana_file_keys()},
      .latents = {.channels = 32, .downsample = 32, .autoencoder = "AutoencoderDC"},
      .size_key = "sample_size",
      // From the repository's configs: 1e-4 times the root of batch / 256, and 2e-5 for Sana-1.5. They do not
      // say the batch of all GPUs or the number of steps. Sana-Sprint's 2e-6 belongs to a distillation, which
      // Kiln does not do.
      .published = {{"Sana-Sprint-", 0, 0, 0, 0, ""},
                    {"Sana-1.5-", 0, 256, 2e-5, 0, kRootRule},
                    {"Sana-", 0, 256, 1e-4, 0, kRootRule}},
      .calibration = {{384, 12, 6, 1, 512, 4}, {1152, 36, 2, 1, 512, 4}},
      // The repository's README. Its PixArt figures are in pixart_family.cpp.
      .quality = {{"Sana-600M-512", 512, 0, 0, 5.67, kMjhqFid},
                  {"Sana-1600M-512", 512, 0, 0, 5.16, kMjhqFid},
                  {"Sana-600M", 1024, 0, 0, 5.81, kMjhqFid},
                  {"Sana-1600M", 1024, 0, 0, 5.76, kMjhqFid}},
      .quoted = {{"Sana-600M", 10'000, kConcepts},
                 {"Sana-1600M", 10'000, kConcepts},
                 {"Sana-1.5-", 10'000, kConcepts}},
      .objectives = {{"",
                      R"({"objective": "flow", "flow-shift": 3.0, "timestep-sampling": "logit_normal"})"}},
      .sampling = {{"", "dpmpp_2m", 20, 4.5}}};  // its pipeline in diffusers
}

}  // namespace kiln
