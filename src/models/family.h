// The interface of a family of denoisers to the rest of Kiln. A family is a folder of models/denoisers/ and a
// row of families.h there. No other file names it (tools/check_layers): what differs between
// families is a field of the row, or of the shape of a model (models/model.h).
#pragma once
#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/json.h"
#include "models/model.h"

namespace kiln {

using WeightShapes = std::map<std::string, std::vector<int64_t>>;  // by published key
using TensorMap = std::map<std::string, at::Tensor>;

// Returns the size of a dimension of a weight; 0 if there is none.
inline int64_t dimension_of(const WeightShapes& shapes, const std::string& key, size_t dim) {
  const auto found = shapes.find(key);
  return found != shapes.end() && dim < found->second.size() ? found->second[dim] : 0;
}
// Returns the shape of a weight that has so many dimensions; null if there is none.
inline const std::vector<int64_t>* find_shape(const WeightShapes& shapes, const std::string& key,
                                              size_t num_dims) {
  const auto found = shapes.find(key);
  return found != shapes.end() && found->second.size() == num_dims ? &found->second : nullptr;
}

// The demands of a run on its model. Each family maps them to its own config.
struct ModelNeeds {
  int64_t channels = 0, height = 0, width = 0;  // of x_0; the largest of several shapes
  int64_t side = 0;  // of x_0 where the model is square; the nominal one of several shapes
  bool has_one_shape = true;
  int64_t num_classes = 0;
  double class_dropout_prob = 0;
  int64_t text_width = 0, max_text_rows = 0;  // of captions; 0: there are none
  bool has_image_size = false;                // the pictures' original sizes are known
  bool learns_sigma = false;
  // 0 stands for the model's own value.
  int64_t hidden_size = 0, depth = 0, num_heads = 0, patch_size = 0;
  double position_scale = 0;  // positions are divided by this
};

// The model that weights were recognised as.
struct RecognisedModel {
  nlohmann::json config;             // as Family::resolve returns it
  std::vector<std::string> assumed;  // its keys that follow from neither weights nor hints
};

// What the Python of a model card says of a class of diffusers. It may use `model`, the inputs `x` (B, C, H,
// W) and `t` (B), the conditions `labels` (B), or `rows` (B, L, D) and `mask` (B, L), and the picture's
// `height` and `width`.
struct CardCode {
  const char* forward;            // an expression: the prediction (B, C or 2C, H, W)
  const char* setup = "";         // statements on `model`
  const char* call = "";          // further arguments of the pipeline's call
  bool passes_masks = true;       // the call takes the masks of captions
  bool takes_flow_match = false;  // the pipeline runs FlowMatchEulerDiscreteScheduler
  // Says what the pipeline does otherwise than Kiln with a model of this config.json of the class; "":
  // nothing.
  std::string (*limit)(const nlohmann::json& foreign) = nullptr;
};

inline constexpr const char *kNullRowsFile = "null_caption.safetensors", *kNullRowsTensor = "null_caption";

// The format of a family's weights in another program: a class of diffusers.
struct ForeignFormat {
  const char* class_name;                                 // of config.json's "_class_name"
  const char* component;                                  // its folder in a pipeline: "transformer", "unet"
  const char* (*pipeline)(const nlohmann::json& config);  // "_class_name" of model_index.json
  const char* text_encoder = "";         // of the published models; "": they take no captions
  std::vector<const char*> absent = {};  // components that the user gives when loading a pipeline
  // Names the null rows (L, D), which have no place in the class: they lie in kNullRowsFile of the pipeline's
  // folder, and load_model() reads them. "": the family has none.
  const char* null_rows_key = "";
  // Throws Error naming a setting that the family does not have.
  nlohmann::json (*config_from)(const nlohmann::json& foreign, const std::string& source);
  // `source`: the file of the weights. Throws Error listing missing and unknown keys.
  TensorMap (*weights_from)(const nlohmann::json& config, const TensorMap& weights,
                            const std::string& source);
  // Both throw Error for what the class cannot express.
  nlohmann::json (*config_to)(const nlohmann::json& config);
  TensorMap (*weights_to)(const nlohmann::json& config, const TensorMap& weights);
  CardCode card;
};

// Files with other published keys of the same weights, or with tensors that the model lacks.
struct FileKeys {
  // True if a file of these shapes has such keys.
  bool (*are)(const WeightShapes& shapes);
  // Throws Error listing missing and unknown keys.
  TensorMap (*to_model)(const nlohmann::json& config, const TensorMap& weights, const std::string& source);
  TensorMap (*to_file)(const nlohmann::json& config, const TensorMap& tensors);  // weights or gradients
};

// The latents that the published models of a family make, and the class of diffusers that makes them.
struct PublishedLatents {
  int64_t channels = 4, downsample = 8;  // of Stable Diffusion's autoencoder
  const char* autoencoder = "AutoencoderKL";
};

// How a published model was trained.
struct PublishedTraining {
  const char* model;       // a preset's name, or the beginning of several
  int64_t image_size = 0;  // 0: any
  int64_t global_batch = 0;
  double lr = 0;
  int64_t steps = 0;  // 0: not published, nor is the batch; `lr` is then that of `global_batch`
  const char* source;
  int64_t least_batch = 0;  // guides advise at least this many; 0: not known
};

// The objective of published models.
struct PublishedObjective {
  const char* model;    // a preset's name, or the beginning of several
  const char* options;  // options of a run, as JSON
};

// How the authors of published models draw with them.
struct PublishedSampling {
  const char* model = "";    // a preset's name, or the beginning of several
  const char* sampler = "";  // one of sampler_names(); empty: not known
  int64_t steps = 0;
  double cfg_scale = 4;
};

// Quality of a published model: the FID of 50,000 pictures without guidance after `steps`, or where `steps`
// is 0 that of the released model by `measure`.
struct PublishedQuality {
  const char* model;
  int64_t image_size, global_batch, steps;
  double fid;
  const char* measure = "FID-50K without guidance";
};

// What a guide says of a model after so many steps. Its authors do not say it.
struct QuotedMilestone {
  const char* model;  // a preset's name, or the beginning of several
  int64_t steps;
  const char* name;
};

// A speed that someone measured and published.
struct MeasuredTraining {
  const char* model;
  int64_t image_size;
  const char* gpu;  // the beginning of a GPU's name
  int64_t gpus, global_batch;
  double steps_per_s;
  const char* options;  // options of the run, as JSON
  const char* source;
};

// The architecture of a small model that measures a machine's speed. 0 stands for the model's own value.
struct CalibrationWorkload {
  int64_t hidden_size, num_heads, depth, patch_size, image_size, batch, micro_batch = 0;
  const char* config = "";  // further settings of the model, as JSON
};

struct Family {
  const char* name;  // also the name of the preset that presets nothing
  const std::map<std::string, nlohmann::json>& (*presets)();
  // Validates every key and returns the full config. Throws Error naming an unknown key, a wrong type or a
  // value that does not fit.
  nlohmann::json (*resolve)(const nlohmann::json& config);
  // Adds to the config what it leaves open and the shapes of weights determine. Throws Error where they
  // contradict the config.
  nlohmann::json (*complete)(const nlohmann::json& config, const WeightShapes& shapes);
  // Returns `config` with what the run needs.
  nlohmann::json (*fit)(const nlohmann::json& config, const ModelNeeds& needs);
  std::unique_ptr<Denoiser> (*build)(const nlohmann::json& config, const BuildOptions& options);
  // Returns nothing for keys of another family. `hints`: the known part of the config, for what shapes do not
  // determine. Throws Error when the keys are the family's but the shapes do not fit together.
  std::optional<RecognisedModel> (*recognise)(const WeightShapes& shapes, const nlohmann::json& hints);
  std::vector<ForeignFormat> formats;
  std::vector<FileKeys> file_keys = {};
  PublishedLatents latents = {};
  const char* size_key = "input_size";       // of the config: the side of x_0 that a model is made for
  std::vector<PublishedTraining> published;  // the most specific first
  std::vector<CalibrationWorkload> calibration;
  std::vector<MeasuredTraining> measured = {};
  std::vector<PublishedQuality> quality = {};  // ascending steps for each model
  std::vector<QuotedMilestone> quoted = {};
  std::vector<PublishedObjective> objectives = {};  // the most specific first; none: the program's default
  std::vector<PublishedSampling> sampling = {};     // the most specific first
};

}  // namespace kiln
