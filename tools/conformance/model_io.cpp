#include "model_io.h"
#include "core/aten.h"

#include <algorithm>

#include "checkpoint/tensor_files.h"
#include "core/error.h"
#include "core/tensors.h"
#include "models/registry.h"

namespace kiln::conformance {
namespace {

// Models of the interface that come later.
constexpr const char* kNotBuilt[] = {"pixart",           "pixart_diffusers", "sana",
                                     "unet2d_condition", "autoencoder_dc",   "t5_encoder",
                                     "clip_text",        "gemma2",           "inception"};

}  // namespace

std::unique_ptr<Denoiser> build_known_denoiser(const std::string& model, const std::string& config,
                                               const std::string& dtype) {
  if (std::find(std::begin(kNotBuilt), std::end(kNotBuilt), model) != std::end(kNotBuilt))
    fail("models", "{} is not part of this version of Kiln", model);
  return parse_config(config, [&](const nlohmann::json& json) {
    return build_denoiser(model, json, {.compute_dtype = parse_compute_dtype(dtype)});
  });
}

std::unique_ptr<Denoiser> load_denoiser(const std::string& model, const std::string& config,
                                        const std::string& weights, const std::string& dtype) {
  auto denoiser = build_known_denoiser(model, config, dtype);
  load_weights(*denoiser, load_tensors(weights), weights);
  return denoiser;
}

at::Tensor read_labels(const Inputs& inputs, at::IntArrayRef sizes, const DenoiserShape& shape) {
  if (shape.num_classes == 0 && !shape.has_null_class) return {};
  const at::Tensor labels = inputs.get_integers("y", sizes);
  const int64_t max_label = shape.has_null_class ? shape.num_classes : shape.num_classes - 1;
  if (labels.numel() > 0 && (labels.min().item<int64_t>() < 0 || labels.max().item<int64_t>() > max_label))
    fail("inputs", "class labels must lie in 0..{}, got {}..{}", max_label, labels.min().item<int64_t>(),
         labels.max().item<int64_t>());
  if (!inputs.has("drop")) return labels;
  const at::Tensor drop = inputs.get_integers("drop", sizes);
  if (!shape.has_null_class && (drop == 1).any().item<bool>())
    fail("inputs", "drop is given, but the model has no null class (class_dropout_prob is 0)");
  return at::where(drop == 1, at::full_like(labels, shape.num_classes), labels);
}

}  // namespace kiln::conformance
