// forward of text encoders: ids in, features out.
#pragma once
#include <string>

#include "io.h"

namespace kiln::conformance {

struct TextForwardOptions {
  std::string model, config, weights, inputs, dtype;
};

// last_hidden_state (B, L, D) with padded positions, and what else the encoder gives: sentence_embedding or
// pooler_output (B, D), penultimate_hidden_state (B, L, D).
Tensors run_text_encoder(const TextForwardOptions& options);

}  // namespace kiln::conformance
