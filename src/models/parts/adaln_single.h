// Parts that text-to-image transformers after PixArt-alpha (Chen et al. 2023, sec. 2.3) share. One projection
// of the timestep serves all blocks ("adaLN-single"); each block adds its own table to it. Captions are
// projected once for all cross attentions.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

#include "models/conditioning.h"
#include "models/parts/layers.h"

namespace kiln {

inline constexpr int64_t kScalarFrequencies = 256;  // width of a sinusoidal embedding
inline constexpr int64_t kModulationVectors =
    6;  // per block: shift, scale and gate of attention and of the MLP

// Numbers of patches along the sides of x_t.
struct PatchGrid {
  int64_t height, width;
};
PatchGrid patch_grid(const ModelInput& input, int64_t patch_size);

// Makes a layer of an embedding MLP. Its weights start as N(0, 0.02).
Linear embedding_linear(const ParameterScope& scope, const std::string& name, int64_t in, int64_t out);
// Makes a table (vectors, width) that is added to the timestep's projection. Starts as N(0, 1 / width).
std::shared_ptr<Parameter> modulation_table(const ParameterScope& scope, const std::string& name,
                                            int64_t vectors, int64_t width);

// Linear, SiLU, Linear on sinusoidal embeddings of scalars.
struct ScalarEmbedder {
  Linear first, second;
  at::Tensor forward(const at::Tensor& scalars, at::ScalarType compute_dtype) const;  // (n) -> (n, D) f32
};

// Linear, tanh-GELU, Linear: (T, C) -> (T', D) with T' >= T. Rows from T on are padding to whole blocks.
// Captions have another number of rows at every step, and oneDNN compiles and keeps kernels for each number;
// whole blocks keep the different numbers few.
struct CaptionMlp {
  Linear first, second;
  at::Tensor forward(const at::Tensor& rows, at::ScalarType compute_dtype) const;
};

// Maps the timestep's embedding (B, D) f32 to State::conditioning (B, 7 D) f32. The blocks take the first 6
// D, `projection` of the embedding's SiLU; the last layer takes the other D, the embedding itself. It is f32
// because every block adds to its gradient.
at::Tensor pack_modulation(const at::Tensor& embedding, const Linear& projection,
                           at::ScalarType compute_dtype);
// Returns the six vectors (B, D) of a block: table (6, D) + the projection.
std::vector<at::Tensor> block_modulation(const at::Tensor& table, const at::Tensor& conditioning);

// The last segment: a norm modulated by table + the embedding, then a linear layer from tokens to pixels. Its
// weights are its models'.
class ModulatedFinal : public Segment {
 public:
  // hidden (B, N, D), conditioning as pack_modulation() gives it -> hidden (B, C, H, W) f32
  State forward(const State& state, const ModelInput& input) const override;

 protected:
  ModulatedFinal(int64_t patch_size, const BuildOptions& options)
      : compute_dtype_(options.compute_dtype), patch_size_(patch_size) {
    name_ = "final";
  }

  std::shared_ptr<Parameter> table_;  // (2, D)
  Linear linear_;

 private:
  at::ScalarType compute_dtype_;
  int64_t patch_size_;
};

// Returns the captions' rows (T, D). Rows of dropped captions are replaced by `null_rows` (L, D): a row that
// was at index i of the padded caption becomes null row i. Throws Error when a caption has more than L rows.
at::Tensor rows_with_nulls(const TextRows& text, const at::Tensor& null_rows);

}  // namespace kiln
