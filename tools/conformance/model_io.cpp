#include "model_io.h"
#include "core/aten.h"

#include "checkpoint/tensor_files.h"
#include "core/error.h"
#include "core/tensors.h"
#include "models/registry.h"

namespace kiln::conformance {

std::unique_ptr<Denoiser> build_known_denoiser(const std::string& model, const std::string& config,
                                               const std::string& dtype) {
  return parse_config(config, [&](const nlohmann::json& json) {
    return build_denoiser(model, json, {.compute_dtype = parse_compute_dtype(dtype)});
  });
}

LoadedDenoiser load_denoiser(const std::string& model, const std::string& config, const std::string& weights,
                             const std::string& dtype) {
  LoadedDenoiser loaded{.denoiser = build_known_denoiser(model, config, dtype),
                        .in_file_keys = [](const Tensors& tensors) { return tensors; }};
  Tensors tensors = load_tensors(weights);
  const Family& family = family_of(model);
  const nlohmann::json resolved = resolve_denoiser_config(model, read_config(config));
  if (const FileKeys* keys = file_keys_of(family, tensors)) {
    tensors = keys->to_model(resolved, tensors, weights);
    loaded.in_file_keys = [keys, resolved](const Tensors& ours) { return keys->to_file(resolved, ours); };
  }
  load_weights(*loaded.denoiser, tensors, weights);
  return loaded;
}

namespace {

std::vector<int64_t> with(at::IntArrayRef leading, at::IntArrayRef trailing) {
  std::vector<int64_t> sizes = leading.vec();
  sizes.insert(sizes.end(), trailing.begin(), trailing.end());
  return sizes;
}

// (B) bool, undefined where nothing is dropped.
at::Tensor read_drop(const Inputs& inputs, at::IntArrayRef sizes, const std::string& prefix, bool has_null) {
  if (!inputs.has(prefix + "drop")) return {};
  const at::Tensor drop = inputs.get_integers(prefix + "drop", sizes).flatten() == 1;
  if (!has_null && drop.any().item<bool>())
    fail(
        "inputs",
        "drop is given, but the model has neither a null class (class_dropout_prob is 0) nor a null caption");
  return drop;
}

at::Tensor read_labels(const Inputs& inputs, at::IntArrayRef sizes, const ConditioningShape& shape,
                       const std::string& prefix) {
  const at::Tensor labels = inputs.get_integers(prefix + "y", sizes).flatten();
  const int64_t max_label = shape.has_null_class ? shape.num_classes : shape.num_classes - 1;
  if (labels.numel() > 0 && (labels.min().item<int64_t>() < 0 || labels.max().item<int64_t>() > max_label))
    fail("inputs", "class labels must lie in 0..{}, got {}..{}", max_label, labels.min().item<int64_t>(),
         labels.max().item<int64_t>());
  const at::Tensor drop = read_drop(inputs, sizes, prefix, shape.has_null_class);
  return drop.defined() ? at::where(drop, at::full_like(labels, shape.num_classes), labels) : labels;
}

TextRows read_captions(const Inputs& inputs, at::IntArrayRef sizes, const ConditioningShape& shape,
                       const std::string& prefix) {
  const std::string name =
      prefix + (inputs.has(prefix + "encoder_hidden_states") ? "encoder_hidden_states" : "caption_embeds");
  const int64_t leading = static_cast<int64_t>(sizes.size());
  const at::Tensor embeds =
      inputs.get(name, with(sizes, {-1, shape.text_width})).flatten(0, leading - 1);  // (B, L, D)
  at::Tensor mask;
  if (inputs.has(prefix + "caption_mask"))
    mask =
        inputs.get_integers(prefix + "caption_mask", with(sizes, {embeds.size(1)})).flatten(0, leading - 1);
  TextRows text = text_rows_of(embeds, mask);
  text.dropped = read_drop(inputs, sizes, prefix, shape.has_null_text);
  return text;
}

}  // namespace

Conditioning read_conditioning(const Inputs& inputs, at::IntArrayRef sizes, const DenoiserShape& model,
                               const std::string& prefix) {
  const ConditioningShape& shape = model.conditioning;
  Conditioning conditioning;
  if (shape.takes_labels()) conditioning.class_labels = read_labels(inputs, sizes, shape, prefix);
  if (shape.takes_text()) conditioning.text = read_captions(inputs, sizes, shape, prefix);
  if (shape.takes_image_size) {
    conditioning.image_hw = inputs.get(prefix + "img_hw", with(sizes, {2})).flatten(0, -2);
    conditioning.aspect_ratio = inputs.get(prefix + "aspect_ratio", with(sizes, {1})).flatten(0, -2);
  }
  if (shape.takes_guidance) conditioning.guidance = inputs.get(prefix + "guidance", sizes).flatten();
  return conditioning;
}

}  // namespace kiln::conformance
