// README.md of a diffusers folder: what the model is, and what draws the same picture with Kiln and with
// diffusers. Also how diffusers takes the steps of Kiln's samplers.
#pragma once
#include <string>
#include <vector>

#include "core/json.h"
#include "models/family.h"
#include "models/model_record.h"

namespace kiln {

struct DiffusersSchedule {
  nlohmann::json config;  // scheduler_config.json, which the loops of pipelines run
  // The config of the scheduler that takes the sampler's steps where the loops of pipelines cannot run it,
  // and why they cannot. Null where they can.
  nlohmann::json outside_pipelines{};
  std::string why_outside{};
  std::string arguments;  // of set_timesteps() and of a pipeline's call, in Python: "num_inference_steps=20"
  std::string limit{};    // how diffusers' steps differ from the sampler's; "": they are the same
  bool is_stochastic = false;  // every step adds noise, which diffusers draws itself
};

// Returns the schedule of a sampler (one of sampler_names()) for a model of this objective (make_objective's
// config). `takes_flow_match`: the pipeline's loop runs FlowMatchEulerDiscreteScheduler. Throws Error for a
// sampler that does not fit the objective.
DiffusersSchedule diffusers_schedule(const std::string& sampler, int64_t num_sampling_steps,
                                     const nlohmann::json& objective, bool takes_flow_match);

// What a card shows. The folder holds the picture's noise in kNoiseFile.
struct ModelCard {
  const ForeignFormat& format;
  const ModelRecord& record;
  const DenoiserShape& shape;
  const DiffusersSchedule& schedule;
  std::string pipeline;       // class of the folder's model_index.json
  std::string limit{};        // why the pipeline draws other pictures; "": it draws the card's
  std::string autoencoder{};  // class of the autoencoder; "": the model makes pixels
  // In the folder.
  bool has_autoencoder = false, has_text_encoder = false, has_null_rows = false, has_step_noise = false;
  bool was_trained_here = false;
  std::vector<std::string> other_pieces{};  // texts on pieces in the folder that are not those of training
  int64_t num_weights = 0, height = 0, width = 0;  // of the picture, in pixels

  // Returns what drawing needs besides the folder: "the autoencoder", "the text encoder".
  std::vector<const char*> missing_pieces() const;
};

// The noise of the card's picture, as kiln sample --noise reads it (diffusion/sampler_noise.h).
inline constexpr const char* kNoiseFile = "noise.safetensors";
inline constexpr uint64_t kCardSeed = 0;

// Returns the text of README.md.
std::string model_card(const ModelCard& card);

}  // namespace kiln
