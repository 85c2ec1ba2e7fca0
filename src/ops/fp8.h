// Products of a linear layer in 8-bit floats (Micikevicius et al. 2022): rows and weights in e4m3, gradients
// in e5m2, each tensor with one scale from its own largest value, sums in f32. Scales are powers of two, so
// that scaling moves exponents alone: the emulation, which multiplies the same 8-bit values in bf16, differs
// from the GPU only in the order of sums. Not differentiable.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

namespace kiln::ops {

// values * scale is what it stands for.
struct Fp8Tensor {
  at::Tensor values;      // (rows, columns) e4m3 or e5m2, or undefined
  at::Tensor transposed;  // (columns, rows), or undefined
  at::Tensor scale;       // 0-d f32, a power of two; the values or it are not finite when the tensor is not
};

// Products read both operands along the inner dimension: which layouts of a tensor they will want.
enum class Fp8Layout { kRows, kTransposed, kBoth };

// `tensor` (rows, columns) f32 or bf16, contiguous; `dtype` at::kFloat8_e4m3fn or at::kFloat8_e5m2.
Fp8Tensor to_fp8(const at::Tensor& tensor, at::ScalarType dtype, Fp8Layout layout = Fp8Layout::kRows);

// Whether a layer's products run in fp8: both of its extents and the number of rows long enough for the
// conversions to pay, and multiples of 16, as the hardware asks.
bool is_fp8_layer(int64_t num_rows, const at::Tensor& weight);

// The layouts that are read: of rows values, of grad values in the second and transposed in the third, where
// rows need transposed alone.
//
// rows (M, in) @ weight (out, in)^T + bias (out) -> (M, out) bf16.
at::Tensor fp8_affine(const Fp8Tensor& rows, const at::Tensor& weight, const std::optional<at::Tensor>& bias);
// grad (M, out) @ weight (out, in) -> (M, in) bf16.
at::Tensor fp8_affine_grad_rows(const Fp8Tensor& grad, const at::Tensor& weight);
// grad (M, out)^T @ rows (M, in) -> (out, in) bf16, in `memory` where that is defined.
at::Tensor fp8_affine_grad_weight(const Fp8Tensor& grad, const Fp8Tensor& rows,
                                  const at::Tensor& memory = {});

// Says in one line why fp8 cannot run on `device`: throws Error on a CPU, unless `emulates`, and on a GPU
// before Ada (compute capability 8.9) or a build without kernels.
void require_fp8(at::Device device, bool emulates);

}  // namespace kiln::ops
