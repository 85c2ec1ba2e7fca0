// The families of denoisers, which are the table of the registry. A new one is a folder, its declaration and
// its row here.
#pragma once
#include "models/family.h"

namespace kiln {

// What the rows of several families say.
constexpr const char* kMjhqFid = "FID on MJHQ-30K, guided";
constexpr const char* kRootRule = "its config, whose rate its trainer multiplies by sqrt(batch / 256)";

// Family::resolve and Family::build, of the function that reads the family's config.
template <auto parse>
nlohmann::json resolve_with(const nlohmann::json& config) {
  return to_json(parse(config));
}
template <auto parse, auto build>
std::unique_ptr<Denoiser> build_with(const nlohmann::json& config, const BuildOptions& options) {
  return build(parse(config), options);
}

Family dit_family();
Family pixart_family();            // PixArt with its repository's keys
Family pixart_diffusers_family();  // PixArt with diffusers' keys
Family sana_family();
Family unet_family();

inline constexpr Family (*kFamilies[])() = {
    dit_family, pixart_family, pixart_diffusers_family, sana_family, unet_family,
};

}  // namespace kiln
