// Checks of all stages that are possible before the first one is trained.
#include <fmt/ranges.h>

#include <map>
#include <optional>

#include "core/error.h"
#include "data/text_store/joined_text.h"
#include "models/registry.h"
#include "train/setup.h"
#include "train/stages/stages.h"
#include "train/training_data.h"

namespace kiln {

namespace {

using WeightSizes = std::map<std::string, std::vector<int64_t>>;

// What must stay the same from one stage to the next, so that its weights fit.
struct StageFacts {
  std::string latents;                // their autoencoder
  std::optional<TextStoreInfo> text;  // absent: no captions
  std::string text_source;            // folder of the captions' store, or of the pictures that have them
  nlohmann::json model_config;
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

StageFacts facts_of(const TrainOptions& options) {
  StageFacts facts;
  DataShape shape;
  const DataSource source = source_of(options.data);
  if (std::holds_alternative<SyntheticData>(source)) {
    shape = synthetic_shape(options);
  } else if (std::holds_alternative<StoredData>(source)) {
    const DataDescription samples = describe(options);
    const StoreInfo& info = samples.info;
    shape = samples.shape;
    if (!samples.text_folders.empty()) {
      facts.text_source = samples.text_folders.front();
      facts.text = read_text_store_info(facts.text_source);
    }
    facts.latents =
        latents_of(info.autoencoder, info.autoencoder_fingerprint, info.scaling_factor, info.shift_factor);
  } else {
    const TrainingData data = open_training_data(options, at::kCPU, at::kFloat, /*encodes=*/false);
    shape = data.shape;
    if (data.text) facts.text = data.text->info();
    facts.text_source = options.data.path;
    facts.latents = latents_of(data.autoencoder.name, data.autoencoder.fingerprint,
                               data.autoencoder.scaling_factor, data.autoencoder.shift_factor);
  }
  facts.model_config =
      denoiser_config_of(options, shape, *make_objective(objective_config_of(options.objective)));
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

nlohmann::json model_config_of(const TrainOptions& options) { return facts_of(options).model_config; }

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
