#include "text_forward.h"

#include <ATen/core/grad_mode.h>

#include "checkpoint/tensor_files.h"
#include "core/aten.h"
#include "core/error.h"
#include "core/tensors.h"
#include "models/text/text_registry.h"
#include "models/weights.h"

namespace kiln::conformance {
namespace {

TokenRows read_tokens(const Inputs& inputs) {
  const at::Tensor ids = inputs.get_integers("input_ids", {-1, -1});
  if (ids.numel() == 0) fail("forward", "expected at least one token in {}", inputs.path());
  at::Tensor mask;
  if (inputs.has("attention_mask")) mask = inputs.get_integers("attention_mask", ids.sizes()) != 0;
  TokenRows tokens = token_rows_of(ids, mask, /*keeps_padding=*/true);
  if (inputs.has("token_type_ids"))
    tokens.types = inputs.get_integers("token_type_ids", ids.sizes()).flatten();
  return tokens;
}

}  // namespace

Tensors run_text_encoder(const TextForwardOptions& options) {
  const at::NoGradGuard no_grad;
  const auto encoder = parse_config(options.config, [&](const nlohmann::json& json) {
    return build_text_encoder(options.model, json, {.compute_dtype = parse_compute_dtype(options.dtype)});
  });
  load_weights(encoder->parameters(), text_encoder_weights(options.model, load_tensors(options.weights)),
               options.weights);
  const TokenRows tokens = read_tokens(Inputs(options.inputs));
  const auto batch = static_cast<int64_t>(tokens.host_offsets.size()) - 1;
  const TextFeatures features = encoder->encode(tokens);
  const auto as_batch = [&](const at::Tensor& rows) { return rows.view({batch, -1, rows.size(1)}); };
  Tensors outputs = {{"last_hidden_state", as_batch(features.last_hidden)}};
  if (features.penultimate.defined()) outputs["penultimate_hidden_state"] = as_batch(features.penultimate);
  if (features.pooled.defined())
    outputs[options.model == "bert" ? "sentence_embedding" : "pooler_output"] = features.pooled;
  return outputs;
}

}  // namespace kiln::conformance
