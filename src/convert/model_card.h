// README.md of a diffusers folder: what the model is, and what draws the same picture with Kiln and with
// diffusers.
#pragma once
#include <string>
#include <vector>

#include "convert/diffusers_schedule.h"
#include "models/family.h"
#include "models/model_record.h"

namespace kiln {

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
};

// The noise of the card's picture, as kiln sample --noise reads it (diffusion/sampler_noise.h).
inline constexpr const char* kNoiseFile = "noise.safetensors";
inline constexpr uint64_t kCardSeed = 0;

// Returns the text of README.md.
std::string model_card(const ModelCard& card);

}  // namespace kiln
