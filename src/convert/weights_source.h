// What `convert` and `inspect` are given: a file, a diffusers folder, a run folder or one of its checkpoints.
#pragma once
#include <nlohmann/json.hpp>
#include <string>

namespace kiln {

// Metadata of a converted safetensors file: the model's config, for what shapes do not tell (the number of
// heads).
inline constexpr const char* kModelConfigKey = "kiln_model_config";

struct WeightsSource {
  std::string path;  // the weights: a file or an index
  std::string step;  // "step-00001000" for a checkpoint of a run
  // RUN/config.json of a run's weights, {"model_config"} of a file with such metadata, else null.
  nlohmann::json run;
  nlohmann::json foreign;  // config.json of a class of diffusers that a family reads; null for others
};

// prefer_ema: of a checkpoint, ema.safetensors before model.safetensors. A file within a run knows its run
// too. Throws Error saying what a folder lacks.
WeightsSource find_weights(const std::string& path, bool prefer_ema);

// The model config that a run or a converted file remembers; {} when there is none. Throws Error when it is
// not an object.
nlohmann::json model_config_of(const WeightsSource& source);

// Throws Error naming the path.
nlohmann::json read_json(const std::string& path);

}  // namespace kiln
