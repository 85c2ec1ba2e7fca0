// Products of a linear layer in 8-bit floats (Micikevicius et al. 2022). Rows and weights are e4m3, gradients
// e5m2, sums f32. Each tensor has one scale from its own largest value. Scales are powers of two, so scaling
// changes exponents alone: the emulation multiplies the same 8-bit values in bf16 and differs from the GPU
// only in the order of sums. Not differentiable.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

namespace kiln::ops {

// A tensor in 8-bit floats: it stands for values * scale.
struct Fp8Tensor {
  at::Tensor values;      // (rows, columns) e4m3 or e5m2, or undefined
  at::Tensor transposed;  // (columns, rows), or undefined
  at::Tensor scale;  // 0-d f32, a power of two; if the tensor is not finite, the values or the scale are not
};

// The layouts of a tensor that products will read. They read both operands along the inner dimension.
enum class Fp8Layout { kRows, kTransposed, kBoth };

// Converts a contiguous (rows, columns) tensor of f32 or bf16. `dtype` is at::kFloat8_e4m3fn or
// at::kFloat8_e5m2.
Fp8Tensor to_fp8(const at::Tensor& tensor, at::ScalarType dtype, Fp8Layout layout = Fp8Layout::kRows);

// True if a layer's products run in fp8. Both of its extents and the number of rows must be long enough for
// the conversions to pay, and multiples of 16, as the hardware asks.
bool is_fp8_layer(int64_t num_rows, const at::Tensor& weight);

// fp8_affine reads rows.values, fp8_affine_grad_rows grad.values, and fp8_affine_grad_weight the `transposed`
// of both.
//
// rows (M, in) @ weight (out, in)^T + bias (out) -> (M, out) bf16.
at::Tensor fp8_affine(const Fp8Tensor& rows, const at::Tensor& weight, const std::optional<at::Tensor>& bias);
// grad (M, out) @ weight (out, in) -> (M, in) bf16.
at::Tensor fp8_affine_grad_rows(const Fp8Tensor& grad, const at::Tensor& weight);
// grad (M, out)^T @ rows (M, in) -> (out, in) bf16, written into `memory` if that is defined.
at::Tensor fp8_affine_grad_weight(const Fp8Tensor& grad, const Fp8Tensor& rows,
                                  const at::Tensor& memory = {});

// Throws a one-line Error if fp8 cannot run on `device`: on a CPU unless `emulates`, on a GPU before Ada
// (compute capability 8.9), and in a build without kernels.
void require_fp8(at::Device device, bool emulates);

}  // namespace kiln::ops
