// What text-to-image transformers after PixArt-alpha (Chen et al. 2023, sec. 2.3) share: one projection of
// the timestep for all blocks ("adaLN-single"), to which each block adds a table of its own, and captions
// projected once for all cross attentions.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

#include "models/conditioning.h"
#include "models/parts/layers.h"

namespace kiln {

inline constexpr int64_t kScalarFrequencies = 256;  // width of a sinusoidal embedding
inline constexpr int64_t kModulationVectors = 6;    // of a block: shift, scale, gate of attention; of the MLP

// Counts the patches of x_t.
struct PatchGrid {
  int64_t height, width;
};
PatchGrid patch_grid(const ModelInput& input, int64_t patch_size);

// Makes a layer of an embedding MLP: its weights begin as N(0, 0.02).
Linear embedding_linear(const ParameterScope& scope, const std::string& name, int64_t in, int64_t out);
// What is added to the timestep's projection: (vectors, width), N(0, 1 / width).
std::shared_ptr<Parameter> modulation_table(const ParameterScope& scope, const std::string& name,
                                            int64_t vectors, int64_t width);

// Linear, SiLU, Linear on sinusoidal embeddings of scalars.
struct ScalarEmbedder {
  Linear first, second;
  at::Tensor forward(const at::Tensor& scalars, at::ScalarType compute_dtype) const;  // (n) -> (n, D) f32
};

// Linear, tanh-GELU, Linear: (T, C) -> (T', D), T' >= T. The last rows belong to no sample. Captions have
// another number of rows at every step, and for each number oneDNN compiles and keeps kernels of its own:
// whole blocks of rows make few.
struct CaptionMlp {
  Linear first, second;
  at::Tensor forward(const at::Tensor& rows, at::ScalarType compute_dtype) const;
};

// embedding (B, D) f32 of the timestep -> State::conditioning (B, 7 D) f32: `projection` of its SiLU (6 D),
// which the blocks take, and the embedding itself, which the last layer takes. f32, because every block adds
// to its gradient.
at::Tensor pack_modulation(const at::Tensor& embedding, const Linear& projection,
                           at::ScalarType compute_dtype);
// A block's six vectors (B, D): table (6, D) + the projection.
std::vector<at::Tensor> block_modulation(const at::Tensor& table, const at::Tensor& conditioning);

// The last layer: a norm modulated by table + the embedding, then from tokens to pixels.
struct ModulatedFinal {
  std::shared_ptr<Parameter> table;  // (2, D)
  Linear linear;
  // hidden (B, N, D), conditioning as pack_modulation() gives it -> (B, C, H, W) f32
  at::Tensor forward(const at::Tensor& hidden, const at::Tensor& conditioning, const PatchGrid& grid,
                     int64_t patch_size, double norm_eps, at::ScalarType compute_dtype) const;
};

// The caption's rows (T, D), with `null_rows` (L, D) in the place of dropped captions: row i of a caption
// that had i-th place in its padded form becomes row i of them. Throws Error when a caption is longer than
// they are.
at::Tensor rows_with_nulls(const TextRows& text, const at::Tensor& null_rows);

}  // namespace kiln
