#include "kiln/model.h"

#include "core/text/json_text.h"
#include "library/guarded.h"
#include "models/load_model.h"
#include "models/registry.h"

namespace kiln::v0 {

Model Model::load(const std::string& path, at::Device device) {
  return guarded([&] {
    const LoadedModel loaded = load_model(find_weights(path));
    if (!loaded.family) fail("model", "{} holds weights of a model that Kiln does not know", path);
    auto denoiser = build_denoiser(loaded.name, loaded.model.config, {.device = device});
    load_weights(*denoiser, loaded.weights, loaded.path);
    return Model(loaded.name, std::move(denoiser));
  });
}

Model Model::fresh(const std::string& name, const std::string& config, uint64_t seed, at::Device device) {
  return guarded([&] {
    auto denoiser = build_denoiser(name, parse_json("model", config, "the config"), {.device = device});
    initialize_weights(*denoiser, seed);
    return Model(name, std::move(denoiser));
  });
}

at::Tensor Model::predict(const at::Tensor& x_t, const at::Tensor& timesteps,
                          const at::Tensor& class_labels) const {
  return guarded([&] {
    const ModelInput input{
        .x_t = x_t, .timesteps = timesteps, .conditioning = {.class_labels = class_labels}};
    check_conditioning(denoiser_->shape().conditioning, input.conditioning, x_t.size(0));
    return denoiser_->forward(input);
  });
}

std::map<std::string, at::Tensor> Model::weights() const {
  std::map<std::string, at::Tensor> weights;
  for (const auto& parameter : denoiser_->parameters()) weights[parameter->key] = parameter->value.detach();
  return weights;
}

}  // namespace kiln::v0
