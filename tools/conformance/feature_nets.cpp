#include "feature_nets.h"

#include <ATen/core/grad_mode.h>

#include "checkpoint/tensor_files.h"
#include "core/error.h"
#include "core/json_config.h"
#include "core/tensors.h"
#include "models/features/dinov2.h"
#include "models/features/inception.h"
#include "models/weights.h"

namespace kiln::conformance {

Tensors run_inception(const FeatureNetRun& run) {
  if (run.dtype != "f32") fail("forward", "inception runs in f32 alone, got --dtype {}", run.dtype);
  const InceptionResize resize = parse_config(run.config, [](const nlohmann::json& json) {
    return parse_inception_resize(JsonConfig("inception", json).require<std::string>("resize"));
  });
  const Inputs inputs(run.inputs);
  inputs.get("image");  // throws where it is missing
  const Inception net(load_tensors(run.weights), run.weights, at::kCPU);
  const InceptionFeatures features = net.forward(inputs.all().at("image"), resize);
  return {{"pool3", features.pool3},
          {"logits", features.logits},
          {"logits_unbiased", features.logits_unbiased},
          {"spatial", features.spatial}};
}

Tensors run_dinov2(const FeatureNetRun& run) {
  const Dinov2 net(parse_config(run.config, parse_dinov2_config),
                   {.compute_dtype = parse_compute_dtype(run.dtype)});
  load_weights(net.parameters(), dinov2_weights(load_tensors(run.weights)), run.weights);
  const Inputs inputs(run.inputs);
  const at::NoGradGuard no_grad;
  const Dinov2Features features = net.forward(inputs.get("image", {-1, 3, -1, -1}));
  return {{"last_hidden_state", features.last_hidden_state}, {"pooler_output", features.pooler_output}};
}

}  // namespace kiln::conformance
