#include "models/denoisers/families.h"
#include "models/denoisers/unet/unet.h"

namespace kiln {
namespace {

// Options of a run that trains as the models' repository does.
constexpr const char* kEpsilon = R"({"objective": "epsilon", "beta-schedule": "scaled_linear",
                                     "beta-start": 0.00085, "beta-end": 0.012})";
constexpr const char* kVPrediction = R"({"objective": "v_prediction", "beta-schedule": "scaled_linear",
                                         "beta-start": 0.00085, "beta-end": 0.012})";

// Configs of the models that measure a machine.
constexpr const char
    *kNarrow = R"({"block_out_channels": [64, 128], "layers_per_block": 1, "attention_head_dim": 4,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"]})",
    *kThreeStages = R"({"block_out_channels": [96, 192, 192], "layers_per_block": 1, "attention_head_dim": 8,
    "down_block_types": ["CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"]})",
    *kWide = R"({"block_out_channels": [128, 256], "layers_per_block": 1, "attention_head_dim": 8,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"]})",
    *kPublishedWidths = R"({"block_out_channels": [320, 640], "layers_per_block": 1, "attention_head_dim": 8,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"]})";

}  // namespace

Family unet_family() {
  return {.name = "unet2d_condition",
          .presets = unet_presets,
          .resolve = resolve_with<parse_unet_config>,
          .complete = complete_unet_config,
          .fit = fit_unet_config,
          .build = build_with<parse_unet_config, build_unet>,
          .recognise = recognise_unet,
          .formats = {unet_diffusers_format()},
          .file_keys = {unet_file_keys()},
          .size_key = "sample_size",
          // From the model cards of stable-diffusion-v1-1, v1-5, 2 and 2-1.
          .published = {{"sd15", 256, 2048, 1e-4, 237'000, "Stable Diffusion 1.1's 237K steps at 256 px"},
                        {"sd15", 512, 2048, 1e-4, 1'304'000,
                         "Stable Diffusion 1.5's 194K, 515K and 595K steps at 512 px, after 237K at 256"},
                        {"sd21-v", 768, 2048, 1e-4, 350'000,
                         "Stable Diffusion 2.1's 140K, 55K and 155K steps at 768 px, after 1.55M at less"},
                        {"sd", 0, 2048, 1e-4, 0, "Stable Diffusion's model cards"}},
          // Levels with and without attention, narrow and of the published widths, on large and small feature
          // maps.
          .calibration = {{0, 0, 0, 0, 256, 4, 0, kNarrow},
                          {0, 0, 0, 0, 128, 12, 0, kThreeStages},
                          {0, 0, 0, 0, 256, 2, 0, kWide},
                          {0, 0, 0, 0, 128, 2, 0, kPublishedWidths},
                          {0, 0, 0, 0, 256, 12, 6, kNarrow}},
          .objectives = {{"sd21-v", kVPrediction}, {"", kEpsilon}},
          // The pipeline in diffusers with the scheduler of each model's folder.
          .sampling = {{"sd21-v", "ddim", 50, 7.5}, {"", "pndm", 50, 7.5}}};
}

}  // namespace kiln
