#include "models/registry.h"

#include <fmt/ranges.h>

#include "core/error.h"
#include "core/nearest_name.h"
#include "models/denoisers/dit.h"

namespace kiln {
namespace {

using nlohmann::json;

// A family of models: its named presets, and how a merged config becomes a model.
struct Family {
  const std::map<std::string, json>& (*presets)();
  json (*resolve)(const json& config);                               // every key, validated
  json (*complete)(const json& config, const WeightShapes& shapes);  // what shapes tell and config does not
  std::unique_ptr<Denoiser> (*build)(const json& config, const BuildOptions& options);
};

const Family kFamilies[] = {
    {dit_presets, [](const json& config) { return to_json(parse_dit_config(config)); }, complete_dit_config,
     [](const json& config, const BuildOptions& options) {
       return build_dit(parse_dit_config(config), options);
     }},
};

struct Merged {
  const Family* family;
  json config;  // the preset under the given keys
  json resolve() const { return family->resolve(config); }
};

Merged merge(const std::string& name, const json& config) {
  for (const Family& family : kFamilies) {
    const auto preset = family.presets().find(name);
    if (preset == family.presets().end()) continue;
    if (!config.is_null() && !config.is_object())
      fail("models", "the config of {} must be a JSON object, got {}", name, config.type_name());
    json merged = preset->second;
    if (config.is_object())
      for (const auto& [key, value] : config.items())
        if (!value.is_null()) merged[key] = value;
    return {&family, merged};
  }
  const std::vector<std::string> known = denoiser_names();
  fail("models", "unknown model \"{}\": did you mean \"{}\"? (known are {})", name, nearest_name(name, known),
       fmt::join(known, ", "));
}

}  // namespace

std::unique_ptr<Denoiser> build_denoiser(const std::string& name, const json& config,
                                         const BuildOptions& options) {
  const Merged merged = merge(name, config);
  return merged.family->build(merged.resolve(), options);
}

json resolve_denoiser_config(const std::string& name, const json& config) {
  return merge(name, config).resolve();
}

json resolve_denoiser_config(const std::string& name, const json& config, const WeightShapes& shapes) {
  const Merged merged = merge(name, config);
  return merged.family->resolve(merged.family->complete(merged.config, shapes));
}

std::vector<std::string> denoiser_names() {
  std::vector<std::string> names;
  for (const Family& family : kFamilies)
    for (const auto& [name, preset] : family.presets()) names.push_back(name);
  return names;
}

}  // namespace kiln
