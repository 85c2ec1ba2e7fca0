#include "models/denoisers/pixart_family.h"

#include "models/denoisers/pixart.h"
#include "models/denoisers/pixart_weights.h"

namespace kiln {
namespace {

using nlohmann::json;

json resolved_diffusers_config(const json& foreign, const std::string&) {
  json config = pixart_diffusers_config(parse_pixart_diffusers_config(foreign));
  config.erase("_class_name");
  return config;
}

}  // namespace

Family pixart_family() {
  return {
      .name = "pixart",
      .presets = pixart_presets,
      .resolve = [](const json& config) { return to_json(parse_pixart_config(config)); },
      .complete = complete_pixart_config,
      .fit = fit_pixart_config,
      .build = [](const json& config,
                  const BuildOptions& options) { return build_pixart(parse_pixart_config(config), options); },
      .recognise = recognise_pixart,
      .formats = {pixart_diffusers_format()},
      .file_keys = {pixart_file_keys()},
      .published = {},
      .calibration = {{384, 6, 6, 2, 256, 4}, {768, 12, 3, 4, 256, 16}, {1152, 16, 2, 2, 256, 2}}};
}

Family pixart_diffusers_family() {
  ForeignFormat format = pixart_diffusers_format();
  format.pipeline = [](const json& config) {
    return parse_pixart_diffusers_config(config).micro_condition ? "PixArtAlphaPipeline"
                                                                 : "PixArtSigmaPipeline";
  };
  format.config_from = resolved_diffusers_config;
  format.weights_from = [](const json&, const TensorMap& weights, const std::string&) { return weights; };
  format.config_to = [](const json& config) {
    return pixart_diffusers_config(parse_pixart_diffusers_config(config));
  };
  format.weights_to = [](const json&, const TensorMap& weights) { return weights; };
  return {.name = "pixart_diffusers",
          .presets = pixart_diffusers_presets,
          .resolve = [](const json& config) { return resolved_diffusers_config(config, ""); },
          .complete = complete_pixart_diffusers_config,
          .fit = fit_pixart_diffusers_config,
          .build =
              [](const json& config, const BuildOptions& options) {
                return build_pixart(parse_pixart_diffusers_config(config), options);
              },
          .recognise = recognise_pixart_diffusers,
          .formats = {format},
          .published = {},
          .calibration = {}};
}

}  // namespace kiln
