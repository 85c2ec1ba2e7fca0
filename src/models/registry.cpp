#include "models/registry.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "core/error.h"
#include "core/text/nearest_name.h"
#include "core/text/some_of.h"
#include "models/denoisers/families.h"

namespace kiln {
namespace {

using nlohmann::json;

std::vector<Family>& families() {
  static std::vector<Family> table = [] {
    std::vector<Family> rows;
    for (const auto family : kFamilies) rows.push_back(family());
    return rows;
  }();
  return table;
}

struct Merged {
  const Family* family;
  json config;  // the preset, overridden by the given keys
  json resolve() const { return family->resolve(config); }
};

Merged merge(const std::string& name, const json& config) {
  for (const Family& family : families()) {
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
       some_of(nearest_names(name, known, known.size())));
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
  for (const Family& family : families())
    for (const auto& [name, preset] : family.presets()) names.push_back(name);
  return names;
}

std::string denoiser_names_text() {
  std::vector<std::string> texts;
  for (const Family& family : families()) {
    std::vector<std::string> sizes;
    for (const auto& [name, preset] : family.presets())
      if (name != family.name) sizes.push_back(name);
    texts.push_back(sizes.empty() ? family.name
                                  : fmt::format("{} ({})", family.name, fmt::join(sizes, ", ")));
  }
  return fmt::format("{}", fmt::join(texts, ", "));
}

std::span<const Family> denoiser_families() { return families(); }

int64_t own_image_size(const std::string& name, const json& config) {
  const Merged preset = merge(name, nullptr);
  const char* key = preset.family->size_key;
  const bool says_size = config.is_object() && config.contains(key) && is_integer(config[key]);
  return (says_size ? config[key] : preset.resolve().at(key)).get<int64_t>() *
         preset.family->latents.downsample;
}

void add_denoiser_family(Family family) { families().push_back(std::move(family)); }

const Family& family_of(const std::string& name) { return *merge(name, nullptr).family; }

json fit_denoiser_config(const std::string& name, const json& config, const ModelNeeds& needs) {
  const Merged merged = merge(name, config);
  return merged.family->resolve(merged.family->fit(merged.config, needs));
}

std::string preset_name(const Family& family, const json& config) {
  const auto is_of = [&](const json& preset) {
    for (const auto& [key, value] : preset.items())
      if (config.value(key, json()) != value) return false;
    return !preset.empty();
  };
  for (const auto& [name, preset] : family.presets())
    if (is_of(preset)) return name;
  return family.name;
}

std::optional<RecognisedDenoiser> recognise_denoiser(const WeightShapes& shapes, const json& hints) {
  for (const Family& family : families())
    if (auto model = family.recognise(shapes, hints)) return RecognisedDenoiser{&family, std::move(*model)};
  return std::nullopt;
}

const FileKeys* file_keys_of(const Family& family, const TensorMap& weights) {
  WeightShapes shapes;
  for (const auto& [key, tensor] : weights) shapes[key] = tensor.sizes().vec();
  for (const FileKeys& keys : family.file_keys)
    if (keys.are(shapes)) return &keys;
  return nullptr;
}

TensorMap model_weights(const Family& family, const json& config, const TensorMap& weights,
                        const std::string& source) {
  const FileKeys* keys = file_keys_of(family, weights);
  return keys ? keys->to_model(config, weights, source) : weights;
}

ForeignFamily foreign_family(const std::string& class_name) {
  for (const Family& family : families())
    for (const ForeignFormat& format : family.formats)
      if (class_name == format.class_name) return {&family, &format};
  return {};
}

std::vector<std::string> denoiser_components() {
  std::vector<std::string> components;
  for (const Family& family : families())
    for (const ForeignFormat& format : family.formats)
      if (std::ranges::find(components, format.component) == components.end())
        components.emplace_back(format.component);
  return components;
}

}  // namespace kiln
