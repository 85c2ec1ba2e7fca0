// Where the weights at a path lie, and what their files say about them: a weights file, a diffusers folder, a
// run or one of its checkpoints.
#pragma once
#include <optional>
#include <string>

#include "core/json.h"
#include "models/model_record.h"

namespace kiln {

struct WeightsSource {
  std::string path;  // the weights: a file or an index
  std::string step;  // "step-00001000" for a checkpoint of a run
  // Comes from RUN/config.json, a file's metadata, of FILE.json or config.json beside it, or as far as a
  // diffusers folder tells. Paths in it are where the pieces lie now, if they were found.
  ModelRecord record = {.autoencoder = {.name = ""}};
  // What the record called pieces that lie in a pipeline's folder, which its paths name; "" for others.
  std::string recorded_autoencoder{}, recorded_text_encoder{};
  // A diffusers folder has these; they are null for others.
  nlohmann::json foreign;    // config.json of a class that a family reads
  nlohmann::json scheduler;  // scheduler_config.json
  std::string null_rows;     // its kNullRowsFile; "": there is none
};

struct WeightsChoice {
  bool ema = true;                    // takes a checkpoint's average before its weights
  std::optional<double> ema_decay{};  // of a run with several; absent: the first
};

// Finds the weights at `path`. Throws Error saying what a folder lacks, or for a record that cannot be read.
WeightsSource find_weights(const std::string& path, const WeightsChoice& choice = {});

// Reads a JSON file. Throws Error naming the path.
nlohmann::json read_json(const std::string& path);

}  // namespace kiln
