#include "models/parts/adaln_single.h"

#include <ATen/Parallel.h>
#include <ATen/ops/bucketize.h>

#include <cmath>

#include "core/aten.h"
#include "core/error.h"
#include "models/parts/embeddings.h"
#include "ops/mixed_sum.h"
#include "ops/op_mark.h"
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

at::Tensor ModulatedFinal::forward(const at::Tensor& hidden, const at::Tensor& conditioning,
                                   const PatchGrid& grid, int64_t patch_size, double norm_eps,
                                   at::ScalarType compute_dtype) const {
  const at::Tensor packed = conditioning.view({conditioning.size(0), kModulationVectors + 1, -1});
  const auto vectors =
      ops::mixed_sum(packed.narrow(1, kModulationVectors, 1), table->value.unsqueeze(0)).unbind(1);
  const at::Tensor x = ops::adaln_modulate(hidden, vectors[0], vectors[1], norm_eps, compute_dtype);
  return nn::unpatchify(linear.forward(x, compute_dtype).to(at::kFloat), patch_size, grid.height, grid.width);
}

at::Tensor rows_with_nulls(const TextRows& text, const at::Tensor& null_rows) {
  if (!text.dropped.defined()) return text.rows;
  if (text.longest() > null_rows.size(0))
    fail("models", "a caption has {} rows: the model's null caption has {}", text.longest(),
         null_rows.size(0));
  ops::OpMark mark("kiln::rows_with_nulls", text.rows, null_rows, text.dropped);
  if (text.rows.is_meta()) {  // ATen has no Meta kernels for it
    at::Tensor nulls = at::empty_like(text.rows), chosen = at::empty_like(text.rows);
    mark.outputs(chosen);
    return chosen;
  }
  // The sample of a row is the last one that begins at or before it. Computed on the rows' device, as in
  // row_positions().
  const at::Tensor rows = at::arange(text.rows.size(0), text.offsets.options()),
                   starts = text.offsets.narrow(0, 0, text.num_samples());
  const at::Tensor sample_of_row = at::bucketize(rows, starts, /*out_int32=*/false, /*right=*/true) - 1;
  at::Tensor chosen =
      at::where(text.dropped.index_select(0, sample_of_row).unsqueeze(1),
                null_rows.to(text.rows.scalar_type()).index_select(0, row_positions(text)), text.rows);
  mark.outputs(chosen);
  return chosen;
}

}  // namespace kiln
