// What `convert` and `inspect` are given: a file, a diffusers folder, a run folder or one of its checkpoints.
#pragma once
#include <nlohmann/json.hpp>
#include <string>

namespace kiln {

// The metadata key under which a converted safetensors file holds the model's config, for what shapes do not
// tell (the number of heads).
inline constexpr const char* kModelConfigKey = "kiln_model_config";

struct WeightsSource {
  std::string path;  // the weights: a file or an index
  std::string step;  // "step-00001000" for a checkpoint of a run
  // RUN/config.json for a run's weights, {"model_config"} for a file with such metadata, else null.
  nlohmann::json run;
  nlohmann::json foreign;  // config.json of a diffusers class that a family reads; null for others
};

// Finds the weights at `path`. prefer_ema: takes a checkpoint's ema.safetensors before its model.safetensors.
// A file inside a run also gets that run's config. Throws Error saying what a folder lacks.
WeightsSource find_weights(const std::string& path, bool prefer_ema);

// Returns the model config that a run or a converted file remembers, or {} if there is none. Throws Error
// when it is not an object.
nlohmann::json model_config_of(const WeightsSource& source);

// Reads a JSON file. Throws Error naming the path.
nlohmann::json read_json(const std::string& path);

}  // namespace kiln
