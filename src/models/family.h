// What the rest of Kiln may ask of a family of denoisers. A family is one row of models/registry.cpp and its
// own files in models/denoisers/; no other file names it.
#pragma once
#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "models/model.h"

namespace kiln {

using WeightShapes = std::map<std::string, std::vector<int64_t>>;  // by published key
using TensorMap = std::map<std::string, at::Tensor>;

// What a run asks of its model, whatever the family: each maps it to its own config.
struct ModelNeeds {
  int64_t channels = 0, height = 0, width = 0;  // of x_0; of several shapes the largest
  int64_t side = 0;  // of x_0 where the model is square; of several shapes the nominal one
  bool has_one_shape = true;
  int64_t num_classes = 0;
  double class_dropout_prob = 0;
  int64_t text_width = 0, max_text_rows = 0;  // of its captions; 0: none
  bool has_image_size = false;                // the pictures' original sizes are known
  bool learns_sigma = false;
  // 0: the model's own.
  int64_t hidden_size = 0, depth = 0, num_heads = 0, patch_size = 0;
  double position_scale = 0;  // that positions are divided by
};

// A model that weights were recognised as.
struct RecognisedModel {
  nlohmann::json config;             // as Family::resolve gives it
  std::vector<std::string> assumed;  // keys of it that neither weights nor hints tell
};

// Another program's format of a family's weights: a class of diffusers.
struct ForeignFormat {
  const char* class_name;  // of config.json's "_class_name"
  const char* component;   // the folder of a pipeline that holds it: "transformer", "unet"
  const char* (*pipeline)(const nlohmann::json& config);  // "_class_name" of model_index.json
  const char* autoencoder = "AutoencoderKL";              // class of the pipeline's vae
  const char* objective =
      R"({"type": "iddpm"})";            // of the published models: chooses the pipeline's scheduler
  std::vector<const char*> absent = {};  // components that a pipeline is given at loading
  // Throws Error naming a setting that the family does not have.
  nlohmann::json (*config_from)(const nlohmann::json& foreign, const std::string& source);
  // Throws Error listing missing and unknown keys.
  TensorMap (*weights_from)(const nlohmann::json& config, const TensorMap& weights,
                            const std::string& source);
  // Both throw Error for what the class cannot express.
  nlohmann::json (*config_to)(const nlohmann::json& config);
  TensorMap (*weights_to)(const nlohmann::json& config, const TensorMap& weights);
  // What a user of the written pipeline must know; may be empty.
  std::string (*note)(const nlohmann::json& config);
};

// Other published keys of the same weights, or what files hold beside them.
struct FileKeys {
  bool (*are)(const WeightShapes& shapes);
  // Throws Error listing missing and unknown keys.
  TensorMap (*to_model)(const nlohmann::json& config, const TensorMap& weights, const std::string& source);
  TensorMap (*to_file)(const nlohmann::json& config, const TensorMap& tensors);  // weights or gradients
};

// The latents that the published models of a family draw.
struct PublishedLatents {
  int64_t channels = 4, downsample = 8;  // of Stable Diffusion's autoencoder
};

// How a published model was trained.
struct PublishedTraining {
  const char* model;       // a preset's name, or the beginning of several
  int64_t image_size = 0;  // 0: any
  int64_t global_batch = 0;
  double lr = 0;
  int64_t steps = 0;  // 0: not published, and neither is the batch: `lr` is known for this one
  const char* source;
  int64_t least_batch = 0;  // that guides advise; 0: nothing known
};

// The objective of published models.
struct PublishedObjective {
  const char* model;    // a preset's name, or the beginning of several
  const char* options;  // of a run, as JSON
};

// What a published model's pictures were after so many steps: FID of 50,000, without guidance.
struct PublishedQuality {
  const char* model;
  int64_t image_size, global_batch, steps;
  double fid;
};

// A speed that someone measured and published.
struct MeasuredTraining {
  const char* model;
  int64_t image_size;
  const char* gpu;  // the beginning of a GPU's name
  int64_t gpus, global_batch;
  double steps_per_s;
  const char* options;  // of the run, as JSON
  const char* source;
};

// The architecture of a small model whose operations a machine is measured with; 0: the model's own.
struct CalibrationWorkload {
  int64_t hidden_size, num_heads, depth, patch_size, image_size, batch, micro_batch = 0;
  const char* config = "";  // further settings of the model, as JSON
};

struct Family {
  const char* name;  // of the preset that presets nothing
  const std::map<std::string, nlohmann::json>& (*presets)();
  // The full config, every key validated. Throws Error naming an unknown key, a wrong type or a value that
  // does not fit.
  nlohmann::json (*resolve)(const nlohmann::json& config);
  // What weights of these shapes tell and the config does not. Throws Error where they contradict it.
  nlohmann::json (*complete)(const nlohmann::json& config, const WeightShapes& shapes);
  // The config for a run's needs, over `config`.
  nlohmann::json (*fit)(const nlohmann::json& config, const ModelNeeds& needs);
  std::unique_ptr<Denoiser> (*build)(const nlohmann::json& config, const BuildOptions& options);
  // Nothing for keys of another family. `hints`: a config as far as it is known, for what shapes do not tell.
  // Throws Error when the keys are the family's and the shapes do not fit together.
  std::optional<RecognisedModel> (*recognise)(const WeightShapes& shapes, const nlohmann::json& hints);
  std::vector<ForeignFormat> formats;
  std::vector<FileKeys> file_keys = {};
  PublishedLatents latents = {};
  std::vector<PublishedTraining> published;  // the most particular first
  std::vector<CalibrationWorkload> calibration;
  std::vector<MeasuredTraining> measured = {};
  std::vector<PublishedQuality> quality = {};       // of a model in ascending steps
  std::vector<PublishedObjective> objectives = {};  // the most particular first; none: the program's default
};

}  // namespace kiln
