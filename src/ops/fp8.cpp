#include "ops/fp8.h"

#include <limits>

#include "core/aten.h"
#include "core/error.h"
#include "core/scratch.h"
#include "core/tensors.h"
#include "ops/cuda/launch.h"
#include "ops/kernels.h"
#include "ops/op_mark.h"

namespace kiln::ops {
namespace {

constexpr int64_t kShortest = 256;  // the least extent for which the conversion pays
constexpr int64_t kMultiple = 16;

float largest_value(at::ScalarType dtype) { return dtype == at::kFloat8_e4m3fn ? 448 : 57344; }

// Returns the smallest power of two that is at least `ratio`, by its bits.
at::Tensor power_of_two_above(const at::Tensor& ratio) {
  constexpr int64_t kMantissa = 0x7fffff, kExponent = 0x7f800000;
  return at::bitwise_and(ratio.view(at::kInt) + kMantissa, kExponent).view(at::kFloat);
}

// One operand of a product, read along its inner dimension.
struct Operand {
  at::Tensor values, scale;
};

void product_on_cuda(const Operand& a, const Operand& b, const std::optional<at::Tensor>& bias,
                     bool fast_sums, at::Tensor& result) {
  at::_scaled_mm_out(result, a.values, b.values.t(), a.scale, b.scale, bias, {}, at::kBFloat16, fast_sums);
}

// A CPU emulates; a dry run of it plans the kernels.
constexpr Kernel<decltype(product_on_cuda)> kFp8Product{.cuda = product_on_cuda, .planned_cpu = nothing};
constexpr Kernel<decltype(cuda::to_fp8)> kToFp8{.cuda = cuda::to_fp8, .planned_cpu = nothing};

// a (m, k) @ b^T, b (n, k).
at::Tensor multiply(const Operand& a, const Operand& b, const std::optional<at::Tensor>& bias, bool fast_sums,
                    at::Tensor memory = {}) {
  const ScratchScope scope(Scratch::kMatmul);
  if (const auto kernel = kFp8Product.on(a.values)) {
    if (!memory.defined())
      memory = at::empty({a.values.size(0), b.values.size(0)}, a.values.options().dtype(at::kBFloat16));
    kernel(a, b, bias, fast_sums, memory);
    return memory;
  }
  const at::ScalarType dtype = cpu_product_dtype(at::kBFloat16);
  at::Tensor product =
      at::mm(a.values.to(dtype), b.values.to(dtype).t()).to(at::kBFloat16).mul_(a.scale * b.scale);
  if (bias) product.add_(*bias);
  return memory.defined() ? memory.copy_(product) : product;
}

}  // namespace

Fp8Tensor to_fp8(const at::Tensor& tensor, at::ScalarType dtype, Fp8Layout layout) {
  OpMark mark("kiln::to_fp8", tensor);
  Fp8Tensor result;
  const bool wants_rows = layout != Fp8Layout::kTransposed, wants_transposed = layout != Fp8Layout::kRows;
  const auto bytes = tensor.options().dtype(dtype);
  if (const auto kernel = kToFp8.on(tensor)) {
    result.scale = at::empty({}, tensor.options().dtype(at::kFloat));
    if (wants_rows) result.values = at::empty({tensor.size(0), tensor.size(1)}, bytes);
    if (wants_transposed) result.transposed = at::empty({tensor.size(1), tensor.size(0)}, bytes);
    kernel(tensor, largest_value(dtype), result.scale, dtype, result.values, result.transposed);
  } else {
    constexpr double kSmallest = 1e-30;  // a tensor of zeros has no scale of its own
    const at::Tensor largest =
        at::linalg_vector_norm(tensor, std::numeric_limits<double>::infinity(), {}, false, at::kFloat);
    result.scale = power_of_two_above(at::clamp_min(largest / largest_value(dtype), kSmallest));
    // The product is exact in the tensor's own dtype, and at most the largest value: nothing saturates.
    const at::Tensor values = (tensor * result.scale.reciprocal()).to(dtype);
    if (wants_rows) result.values = values;
    if (wants_transposed) result.transposed = values.t().contiguous();
  }
  mark.outputs(result.values, result.transposed);
  return result;
}

bool is_fp8_layer(int64_t num_rows, const at::Tensor& weight) {
  const auto serves = [](int64_t extent) { return extent >= kShortest && extent % kMultiple == 0; };
  return serves(num_rows) && serves(weight.size(0)) && serves(weight.size(1));
}

at::Tensor fp8_affine(const Fp8Tensor& rows, const at::Tensor& weight,
                      const std::optional<at::Tensor>& bias) {
  const Fp8Tensor converted = to_fp8(weight, at::kFloat8_e4m3fn);
  const OpMark mark("kiln::affine", rows.values, converted.values);
  return multiply({rows.values, rows.scale}, {converted.values, converted.scale}, bias, /*fast_sums=*/true);
}

at::Tensor fp8_affine_grad_rows(const Fp8Tensor& grad, const at::Tensor& weight) {
  const Fp8Tensor converted = to_fp8(weight, at::kFloat8_e4m3fn, Fp8Layout::kTransposed);
  const OpMark mark("kiln::affine_grad_rows", grad.values, converted.transposed.t());
  return multiply({grad.values, grad.scale}, {converted.transposed, converted.scale}, std::nullopt,
                  /*fast_sums=*/false);
}

at::Tensor fp8_affine_grad_weight(const Fp8Tensor& grad, const Fp8Tensor& rows, const at::Tensor& memory) {
  const OpMark mark("kiln::affine_grad_weight", grad.transposed.t(), rows.transposed.t());
  return multiply({grad.transposed, grad.scale}, {rows.transposed, rows.scale}, std::nullopt,
                  /*fast_sums=*/false, memory);
}

void require_fp8(at::Device device, bool emulates) {
  constexpr int kAda = 89;
  if (!device.is_cuda()) {
    if (!emulates)
      fail("fp8",
           "--compute-dtype fp8 expects a GPU of compute capability 8.9 or more, got {}: use bf16, or "
           "--emulate-fp8 to try its arithmetic slowly",
           device.str());
    return;
  }
  const int capability = cuda::capability();
  if (capability < kAda)
    fail("fp8", "--compute-dtype fp8 expects a GPU of compute capability 8.9 or more, got {}.{}: use bf16",
         capability / 10, capability % 10);
}

}  // namespace kiln::ops
