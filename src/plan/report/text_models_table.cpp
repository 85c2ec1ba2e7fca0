// Sizes and published quality of the models that draw captions.
#include <fmt/format.h>

#include "models/registry.h"
#include "plan/report/report.h"
#include "plan/run/make_plan.h"

namespace kiln {

namespace {

// A model that people compare with these, and that Kiln does not train.
struct OtherModel {
  const char *name, *weights, *quality;
};
// Sana's README; 2,567,463,684 weights by its config. Its two text encoders and its decoder are not counted.
constexpr OtherModel kOthers[] = {{"SDXL (its U-Net; not in Kiln)", "2.6 B", "6.63 MJHQ"}};

}  // namespace

std::string text_models_table() {
  std::string table = "| model with captions | weights of the denoiser | published FID |\n|---|---|---|\n";
  for (const Family& family : denoiser_families())
    for (const auto& [name, preset] : family.presets()) {
      if (name == family.name) continue;
      const auto model = build_denoiser(name, nullptr, {.outline = true});
      if (!model->shape().conditioning.takes_text()) continue;
      int64_t weights = 0;
      for (const auto& parameter : model->parameters())
        if (parameter->trainable) weights += parameter->value.numel();
      TrainOptions options;
      options.model.name = name;
      options.data.image_size = model->shape().input_size * family.latents.downsample;
      table += fmt::format("| {} | {:.0f} M | {} |\n", name, static_cast<double>(weights) / 1e6,
                           quality_text(options, 0));
    }
  for (const OtherModel& other : kOthers)
    table += fmt::format("| {} | {} | {} |\n", other.name, other.weights, other.quality);
  return table;
}

}  // namespace kiln
