#include "models/denoisers/families.h"
#include "models/denoisers/pixart/pixart.h"

namespace kiln {
namespace {

using nlohmann::json;

// The repository's training and its pipelines in diffusers, for either kind of keys.
constexpr PublishedObjective kObjective = {"", R"({"objective": "iddpm"})"};
constexpr PublishedSampling kSampling = {"", "dpmpp_2m", 20, 4.5};

json resolved_diffusers_config(const json& foreign, const std::string&) {
  json config = pixart_diffusers_config(parse_pixart_diffusers_config(foreign));
  config.erase("_class_name");
  return config;
}

}  // namespace

Family pixart_family() {
  return {.name = "pixart",
          .presets = pixart_presets,
          .resolve = resolve_with<parse_pixart_config>,
          .complete = complete_pixart_config,
          .fit = fit_pixart_config,
          .build = build_with<parse_pixart_config, build_pixart>,
          .recognise = recognise_pixart,
          .formats = {pixart_diffusers_format()},
          .file_keys = {pixart_file_keys()},
          // Batches and steps are from table 4 of PixArt-alpha's paper (arXiv 2310.00426). Rates follow its
          // repository and PixArt-sigma's: 2e-5 times the root of batch / 256 (configs/*, auto_lr).
          // PixArt-sigma's configs do not say the batch of all GPUs.
          .published = {{"PixArt-Alpha-XL/2-256", 256, int64_t{178} * 64, 1.334e-4, 240'000,
                         "PixArt-alpha's 150K and 90K steps at 256 px, after 300K of ImageNet"},
                        {"PixArt-Alpha-XL/2-512", 512, int64_t{40} * 64, 6.32e-5, 100'000,
                         "PixArt-alpha's 100K steps at 512 px, after those at 256"},
                        {"PixArt-Alpha-XL/2-1024", 1024, int64_t{12} * 32, 2.45e-5, 16'000,
                         "PixArt-alpha's 16K steps at 1024 px, after those at 512"},
                        {"PixArt-", 0, 256, 2e-5, 0, kRootRule}},
          .calibration = {{384, 6, 6, 2, 256, 4}, {768, 12, 3, 4, 256, 16}, {1152, 16, 2, 2, 256, 2}},
          // Measured by Sana's authors (their repository's README).
          .quality = {{"PixArt-Alpha-XL/2-512", 512, 0, 0, 6.14, kMjhqFid},
                      {"PixArt-Sigma-XL/2-512", 512, 0, 0, 6.34, kMjhqFid},
                      {"PixArt-Sigma-XL/2-1024", 1024, 0, 0, 6.15, kMjhqFid}},
          .objectives = {kObjective},
          .sampling = {kSampling}};
}

Family pixart_diffusers_family() {
  ForeignFormat format = pixart_diffusers_format();
  format.pipeline = [](const json& config) {
    return parse_pixart_diffusers_config(config).micro_condition ? "PixArtAlphaPipeline"
                                                                 : "PixArtSigmaPipeline";
  };
  format.null_rows_key = "";
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
          .build = build_with<parse_pixart_diffusers_config, build_pixart>,
          .recognise = recognise_pixart_diffusers,
          .formats = {format},
          .size_key = "sample_size",
          .published = {},
          .calibration = {},
          .objectives = {kObjective},
          .sampling = {kSampling}};
}

}  // namespace kiln
