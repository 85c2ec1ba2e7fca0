// Checks of all stages that are possible before the first one is trained.
#include <fmt/ranges.h>

#include <map>
#include <optional>

#include "core/error.h"
#include "data/text_store/text_store.h"
#include "models/registry.h"
#include "train/encoding/encoded_captions.h"
#include "train/setup.h"
#include "train/stages/stages.h"

namespace kiln {

namespace {

using WeightSizes = std::map<std::string, std::vector<int64_t>>;

// What must stay the same from one stage to the next, so that its weights fit.
struct StageFacts {
  std::string latents{};                // their autoencoder
  std::optional<TextStoreInfo> text{};  // absent: no captions
  std::string text_source{};            // folder of the captions' store, or of the pictures that have them
  nlohmann::json model_config{};
};

std::string latents_of(const std::string& name, const std::string& fingerprint, double scale, double shift) {
  return fmt::format("{} {} times {} from {}", name, fingerprint, scale, shift);
}

WeightSizes weights_of(const TrainOptions& options, const nlohmann::json& config) {
  const auto denoiser = build_denoiser(options.model.name, config, {.outline = true});
  WeightSizes sizes;
  for (const auto& segment : denoiser->segments())
    for (const auto& parameter : segment->parameters())
      sizes[parameter->key] = parameter->value.sizes().vec();
  return sizes;
}

nlohmann::json model_config_of(const TrainOptions& options, const DataDescription& data) {
  const auto objective = make_objective(objective_config_of(options.objective));
  return denoiser_config_of(options, data.shape, *objective);
}

StageFacts facts_of(const TrainOptions& options) {
  const DataDescription data = describe(options);
  StageFacts facts{.model_config = model_config_of(options, data)};
  if (!data.text_folders.empty()) {
    facts.text_source = data.text_folders.front();
    facts.text = read_text_store_info(facts.text_source);
  } else if (data.captions) {
    facts.text_source = options.data.path;
    facts.text = load_captions(*data.captions, /*at_once=*/1, at::kCPU, at::kFloat, EncoderUse::kIds)->info();
  }
  if (data.pictures.images) {
    const auto made_by = load_autoencoder(options.data.autoencoder, at::kCPU, at::kFloat);
    facts.latents =
        latents_of(made_by->name, made_by->fingerprint, made_by->scaling_factor, made_by->shift_factor);
  } else if (const StoreInfo& info = data.info; !info.lanes.empty()) {
    facts.latents =
        latents_of(info.autoencoder, info.autoencoder_fingerprint, info.scaling_factor, info.shift_factor);
  }
  return facts;
}

void require_same(const Stage& stage, const StageFacts& facts, const Stage& first, const StageFacts& before) {
  if (facts.latents != before.latents)
    fail("train",
         "--data {} has latents of another autoencoder ({}) than {} ({}): extract it again with that "
         "autoencoder",
         stage.options.data.path, facts.latents, first.name, before.latents);
  if (facts.text && before.text)
    require_same_encoder(*before.text, before.text_source, *facts.text, facts.text_source);
  // The sizes of fixed tables are compared too.
  const WeightSizes weights = weights_of(stage.options, facts.model_config);
  for (const auto& [key, sizes] : weights_of(first.options, before.model_config))
    if (const auto found = weights.find(key); found == weights.end() || found->second != sizes)
      fail("train",
           "{} cannot change its size or classes between stages: {} has shape {} in {} at --image-size {}, "
           "and another one at {}",
           stage.options.model.name, key, sizes, first.name, first.options.data.image_size,
           stage.options.data.image_size);
}

}  // namespace

nlohmann::json model_config_of(const TrainOptions& options) {
  return model_config_of(options, describe(options));
}

void check_stages(const StagePlan& plan) {
  if (!plan.is_staged()) return;
  StageFacts first;
  for (size_t i = plan.current; i < plan.stages.size(); ++i) try {
      StageFacts facts = facts_of(plan.stages[i].options);
      if (i == plan.current)
        first = std::move(facts);
      else
        require_same(plan.stages[i], facts, plan.stage(), first);
    } catch (const Error& error) {
      throw Error(fmt::format("{} ({})", error.what(), plan.stages[i].name));
    }
}

}  // namespace kiln
