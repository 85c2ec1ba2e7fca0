#include "models/parts/adaln_single.h"

#include <ATen/Parallel.h>

#include <cmath>

#include "core/aten.h"
#include "core/error.h"
#include "models/parts/embeddings.h"
#include "ops/mixed_sum.h"
#include "ops/ops.h"

namespace kiln {

PatchGrid patch_grid(const ModelInput& input, int64_t patch_size) {
  return {input.x_t.size(2) / patch_size, input.x_t.size(3) / patch_size};
}

Linear embedding_linear(const ParameterScope& scope, const std::string& name, int64_t in, int64_t out) {
  return scope.linear(name, in, out, Init::normal(0.02));
}

std::shared_ptr<Parameter> modulation_table(const ParameterScope& scope, const std::string& name,
                                            int64_t vectors, int64_t width) {
  return scope.add(name, {vectors, width}, Init::normal(1 / std::sqrt(static_cast<double>(width))));
}

at::Tensor ScalarEmbedder::forward(const at::Tensor& scalars, at::ScalarType compute_dtype) const {
  const at::Tensor hidden = first.forward(nn::timestep_embedding(scalars, kScalarFrequencies), compute_dtype);
  return second.forward(at::silu(hidden), compute_dtype).to(at::kFloat);
}

at::Tensor CaptionMlp::forward(const at::Tensor& rows, at::ScalarType compute_dtype) const {
  constexpr int64_t kBlock = 32;
  const int64_t missing = at::divup(rows.size(0), kBlock) * kBlock - rows.size(0);
  const at::Tensor blocks = missing == 0 ? rows : at::constant_pad_nd(rows, {0, 0, 0, missing});
  return second.forward_gelu_tanh(first.forward(blocks, compute_dtype), compute_dtype);
}

at::Tensor pack_modulation(const at::Tensor& embedding, const Linear& projection,
                           at::ScalarType compute_dtype) {
  return at::cat({projection.forward(at::silu(embedding), compute_dtype).to(at::kFloat), embedding}, 1);
}

std::vector<at::Tensor> block_modulation(const at::Tensor& table, const at::Tensor& conditioning) {
  const at::Tensor vectors = conditioning.view({conditioning.size(0), kModulationVectors + 1, -1});
  return ops::mixed_sum(vectors.narrow(1, 0, kModulationVectors), table.unsqueeze(0)).unbind(1);
}

State ModulatedFinal::forward(const State& state, const ModelInput& input) const {
  constexpr double kNormEps = 1e-6;
  const at::Tensor packed = state.conditioning.view({state.conditioning.size(0), kModulationVectors + 1, -1});
  const auto vectors =
      ops::mixed_sum(packed.narrow(1, kModulationVectors, 1), table_->value.unsqueeze(0)).unbind(1);
  const at::Tensor x = ops::adaln_modulate(state.hidden, vectors[0], vectors[1], kNormEps, compute_dtype_);
  const PatchGrid grid = patch_grid(input, patch_size_);
  return {.hidden = nn::unpatchify(linear_.forward(x, compute_dtype_).to(at::kFloat), patch_size_,
                                   grid.height, grid.width)};
}

at::Tensor rows_with_nulls(const TextRows& text, const at::Tensor& null_rows) {
  if (!text.dropped.defined()) return text.rows;
  if (text.longest() > null_rows.size(0))
    fail("models", "a caption has {} rows: the model's null caption has {}", text.longest(),
         null_rows.size(0));
  return ops::rows_with_nulls(text.rows, text.offsets, text.dropped, text.positions, null_rows);
}

}  // namespace kiln
