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

// Converts ids (B, L) to rows. In mask (B, L) 1 is a token, and padding stays as rows that nobody attends to;
// undefined: all are tokens.
TokenRows token_rows_of(const at::Tensor& ids, const at::Tensor& mask) {
  TokenRows tokens{.ids = ids.flatten(), .host_offsets = {0}};
  for (int64_t b = 1; b <= ids.size(0); ++b) tokens.host_offsets.push_back(b * ids.size(1));
  if (mask.defined()) tokens.counts = mask.flatten().to(at::kBool);
  return tokens;
}

TokenRows read_tokens(const Inputs& inputs) {
  const at::Tensor ids = inputs.get_integers("input_ids", {-1, -1});
  if (ids.numel() == 0) fail("forward", "expected at least one token in {}", inputs.path());
  at::Tensor mask;
  if (inputs.has("attention_mask")) mask = inputs.get_integers("attention_mask", ids.sizes()) != 0;
  TokenRows tokens = token_rows_of(ids, mask);
  if (inputs.has("token_type_ids"))
    tokens.types = inputs.get_integers("token_type_ids", ids.sizes()).flatten();
  return tokens;
}

// The first `shared_tokens` of all texts are the same: they are computed once.
Tensors after_shared_prefix(const TextEncoder& encoder, const Inputs& inputs) {
  const at::Tensor ids = inputs.get_integers("input_ids", {-1, -1});
  const auto shared = inputs.get_integers("shared_tokens", {1}).item<int64_t>();
  if (encoder.prefix_bytes(1) == 0)
    fail("forward", "{} keeps no prefix: its tokens see all others", encoder.shape().family);
  if (shared < 1 || shared >= ids.size(1))
    fail("forward", "expected shared_tokens of 1 to {}, got {}", ids.size(1) - 1, shared);
  TokenPrefix prefix;
  const at::Tensor before = ids.narrow(0, 0, 1).narrow(1, 0, shared);
  const at::Tensor first = encoder.encode_batch({.tokens = token_rows_of(before, {}), .fills = &prefix});
  at::Tensor mask;
  if (inputs.has("attention_mask"))
    mask = inputs.get_integers("attention_mask", ids.sizes()).narrow(1, shared, ids.size(1) - shared) != 0;
  const at::Tensor rest = ids.narrow(1, shared, ids.size(1) - shared);
  const at::Tensor rows = encoder.encode_batch({.tokens = token_rows_of(rest, mask), .after = &prefix});
  return {{"last_hidden_state", at::cat({first.unsqueeze(0).expand({ids.size(0), -1, -1}),
                                         rows.view({ids.size(0), -1, rows.size(1)})},
                                        1)}};
}

}  // namespace

Tensors run_text_encoder(const TextForwardOptions& options) {
  const at::NoGradGuard no_grad;
  const auto encoder = parse_config(options.config, [&](const nlohmann::json& json) {
    return build_text_encoder(options.model, json, {.compute_dtype = parse_compute_dtype(options.dtype)});
  });
  load_weights(encoder->parameters(), text_encoder_weights(options.model, load_tensors(options.weights)),
               options.weights);
  const Inputs inputs(options.inputs);
  if (inputs.has("shared_tokens")) return after_shared_prefix(*encoder, inputs);
  const TokenRows tokens = read_tokens(inputs);
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
