#include "ops/matrix_products.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <utility>

#include "core/aten.h"
#include "core/scratch.h"
#include "core/tensors.h"
#include "core/threads/parallel_pieces.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/onednn_scratch.h"
#include "ops/cuda/launch.h"
#include "ops/gelu.h"
#include "ops/kernels.h"
#include "ops/op_mark.h"
#include "ops/ops.h"
#include "ops/planned/planned.h"

namespace kiln::ops {
namespace {

// Returns the operand in the dtype that is multiplied.
at::Tensor operand(const at::Tensor& tensor) {
  return tensor.to(product_dtype(tensor.device(), tensor.scalar_type()));
}

// oneDNN's linear adds the bias in the product's own pass, where at::addmm writes and reads the result once
// more. f32 and bf16 run 8 to 20 % faster.
at::Tensor onednn_linear(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& bias) {
  using Signature =
      at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, std::string_view,
                 c10::List<std::optional<at::Scalar>>, std::optional<std::string_view>);
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("mkldnn::_linear_pointwise", "").typed<Signature>();
  return op.call(rows, weight, bias, "none", c10::List<std::optional<at::Scalar>>(), "");
}

// Computes each piece by one thread, with the bits of the whole. oneDNN's linear adds the bias in f32 and has
// no memory to write to: in f32 the bias is added afterwards, and a bf16 piece is copied, while the cache
// holds it.
at::Tensor product_in_pieces(const ProductOperands& of, const cpu::ProductPieces& pieces) {
  const at::Tensor right = of.product == cpu::Product::kAffine ? of.right.t() : of.right;  // (k, n)
  const at::Tensor bias = of.bias.defined() ? of.bias.to(of.left.scalar_type()) : at::Tensor();
  const at::Tensor result =
      of.memory.defined() ? of.memory : at::empty({of.left.size(0), right.size(1)}, of.left.options());
  const int64_t side = pieces.of_rows ? 0 : 1;
  parallel_pieces(result.size(side), pieces.size, [&](int64_t begin, int64_t end) {
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    const at::DisableRecordFunctionGuard unseen;  // whoever listens sees the operation as a whole
    const ScratchScope scope(Scratch::kMatmul);
    const auto piece_of = [&](const at::Tensor& tensor, int64_t dim) {
      return tensor.narrow(dim, begin, end - begin);
    };
    const at::Tensor rows = pieces.of_rows ? piece_of(of.left, 0) : of.left,
                     columns = pieces.of_rows ? right : piece_of(right, 1);
    at::Tensor piece = piece_of(result, side);
    const at::Tensor terms = bias.defined() && !pieces.of_rows ? piece_of(bias, 0) : bias;
    if (terms.defined() && result.scalar_type() == at::kBFloat16) {
      piece.copy_(onednn_linear(rows, columns.t(), terms));
    } else {
      at::mm_out(piece, rows, columns);
      if (terms.defined()) piece.add_(terms);
    }
  });
  return result;
}

at::Tensor product_on_cpu(ProductOperands of) {
  const at::ScalarType dtype = of.left.scalar_type();
  const bool has_onednn = of.left.numel() > 0 && of.right.numel() > 0 && at::hasMKLDNN() &&
                          (dtype == at::kFloat || dtype == at::kBFloat16);
  if (!has_onednn) return aten_product(std::move(of));
  const int64_t n = of.right.size(of.product == cpu::Product::kAffine ? 0 : 1);
  const cpu::ProductPieces pieces =
      cpu::product_pieces(of.product, dtype, of.left.size(0), n, of.left.size(1));
  if (pieces.count > 1) return product_in_pieces(of, pieces);
  if (!of.bias.defined()) return aten_product(std::move(of));
  return onednn_linear(of.left, of.right, of.bias.to(dtype));
}

constexpr Kernel<decltype(product_on_cpu)> kLinearProduct{.cpu = product_on_cpu,
                                                          .cuda = aten_product,
                                                          .planned_cpu = planned::product_of_cpu,
                                                          .planned_cuda = aten_product};

constexpr int64_t kRowsOfColumnSum = 256;  // fixed, so that the bits do not depend on the threads

void column_sum_on_cpu(const at::Tensor& rows, const at::Tensor& partials, const at::Tensor& sums) {
  const int64_t num_rows = rows.size(0), width = rows.size(1), num_partials = partials.size(0);
  const char* from = static_cast<const char*>(rows.const_data_ptr());
  float* to = partials.mutable_data_ptr<float>();
  const Dtype dtype = from_scalar_type(rows.scalar_type());
  parallel_pieces(num_partials, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i * kRowsOfColumnSum;
      cpu::column_sum(dtype, from + first * width * rows.element_size(),
                      std::min(kRowsOfColumnSum, num_rows - first), width, to + i * width);
    }
  });
  cpu::sum_partials(to, num_partials, width, sums.mutable_data_ptr(), dtype, width);
}

constexpr Kernel<decltype(column_sum_on_cpu)> kColumnSum{.cpu = column_sum_on_cpu};

}  // namespace

at::Tensor aten_product(ProductOperands of) {
  if (of.product == cpu::Product::kAffine) of.right = of.right.t();
  if (of.bias.defined()) return at::addmm(of.bias.to(of.left.scalar_type()), of.left, of.right);
  return of.memory.defined() ? at::mm_out(of.memory, of.left, of.right) : at::mm(of.left, of.right);
}

at::Tensor affine_grad_weight(const at::Tensor& grad, const at::Tensor& rows, at::Tensor memory) {
  OpMark mark("kiln::affine_grad_weight", grad, rows);
  const ScratchScope scope(Scratch::kMatmul);
  const at::Tensor g = operand(grad).t(), b = operand(rows);
  const bool in_memory = memory.defined() && memory.scalar_type() == g.scalar_type();
  const at::Tensor product =
      kLinearProduct.on(g)({cpu::Product::kTransposed, g, b, /*bias=*/{}, in_memory ? memory : at::Tensor()});
  if (!memory.defined()) return product.to(grad.scalar_type());
  if (!in_memory) memory.copy_(product);
  return memory;
}

at::Tensor affine_grad_bias(const at::Tensor& grad, at::Tensor memory) {
  OpMark mark("kiln::affine_grad_bias", grad);
  const auto kernel = kColumnSum.serving(grad);
  if (!kernel || !grad.is_contiguous())
    return memory.defined() ? at::sum_out(memory, grad, 0) : at::sum(grad, 0);
  const at::Tensor sums = memory.defined() ? memory : at::empty({grad.size(1)}, grad.options());
  const at::Tensor partials =
      at::empty({at::divup(grad.size(0), kRowsOfColumnSum), grad.size(1)}, grad.options().dtype(at::kFloat));
  kernel(grad, partials, sums);
  return sums;
}

namespace {

void* data_of(const at::Tensor& tensor) { return tensor.defined() ? tensor.mutable_data_ptr() : nullptr; }

// Returns true, and does nothing, if cuBLASLt has no such product. `bias` and `hidden` may be undefined.
bool lacks_epilogue(EpilogueProduct product, const at::Tensor& left, const at::Tensor& right,
                    const at::Tensor& result, const at::Tensor& bias, const at::Tensor& hidden,
                    const at::Tensor& workspace) {
  const bool is_affine = product == EpilogueProduct::kAffineGelu || product == EpilogueProduct::kAffine;
  const EpilogueProductArgs args{
      .product = product,
      .dtype = from_scalar_type(left.scalar_type()),
      .rows = static_cast<size_t>(left.size(0)),
      .out_features = static_cast<size_t>(is_affine ? result.size(1) : left.size(1)),
      .in_features = static_cast<size_t>(is_affine ? left.size(1) : result.size(1)),
      .left = left.const_data_ptr(),
      .right = right.const_data_ptr(),
      .result = data_of(result),
      .bias = data_of(bias),
      .hidden = data_of(hidden)};
  return !cuda::epilogue_product(args, workspace);
}

constexpr Kernel<decltype(lacks_epilogue)> kLacksEpilogue{.cuda = lacks_epilogue};

// True for dtypes that cuBLASLt's epilogues take. A dry run assumes that the GPU has them.
bool has_epilogues(const at::Tensor& tensor) {
  const at::ScalarType dtype = tensor.scalar_type();
  return kLacksEpilogue.serving(tensor) && (dtype == at::kBFloat16 || dtype == at::kHalf);
}

at::Tensor memory_like(const at::Tensor& memory, at::IntArrayRef sizes, const at::Tensor& like) {
  return memory.defined() ? memory : at::empty(sizes, like.options());
}

// Returns false if it did nothing. `hidden` may be undefined.
bool with_epilogue(EpilogueProduct product, const at::Tensor& left, const at::Tensor& right,
                   const at::Tensor& result, const at::Tensor& bias, const at::Tensor& hidden) {
  if (left.numel() == 0 || !left.is_contiguous() || !right.is_contiguous()) return false;
  constexpr int64_t kWorkspaceBytes = 32 << 20;  // NVIDIA's advice for Hopper
  const at::Tensor workspace = at::empty({kWorkspaceBytes}, left.options().dtype(at::kByte));
  return !kLacksEpilogue.on(left)(product, left, right, result, bias, hidden, workspace);
}

bool is_planned_timed() { return OpChoicesScope::current().time_products; }

// True if the algorithms of products without elementwise work are timed. A dry run is asked by its choices;
// autograd's threads do not see them, so on a GPU the whole process times or does not.
constexpr Kernel<bool()> kTimesProducts{.cuda = cuda::times_epilogue_algorithms,
                                        .planned_cuda = is_planned_timed};

bool takes_timed(const at::Tensor& left, const at::Tensor& right) {
  const auto times = kTimesProducts.on(left);
  return times && times() && has_epilogues(left) && left.scalar_type() == right.scalar_type();
}

}  // namespace

at::Tensor affine(const at::Tensor& rows, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  OpMark mark("kiln::affine", rows, weight, bias.value_or(at::Tensor()));
  const ScratchScope scope(Scratch::kMatmul);
  if (takes_timed(rows, weight)) {
    const at::Tensor result = at::empty({rows.size(0), weight.size(0)}, rows.options());
    const at::Tensor bias_of_dtype = bias && bias->defined() ? bias->to(rows.scalar_type()) : at::Tensor();
    if (with_epilogue(EpilogueProduct::kAffine, rows, weight, result, bias_of_dtype, {})) return result;
  }
  const at::Tensor a = operand(rows), b = operand(weight);
  const at::Tensor y =
      kLinearProduct.on(a)({cpu::Product::kAffine, a, b, /*bias=*/bias.value_or(at::Tensor())});
  return y.to(rows.scalar_type());
}

at::Tensor affine_grad_rows(const at::Tensor& grad, const at::Tensor& weight) {
  OpMark mark("kiln::affine_grad_rows", grad, weight);
  const ScratchScope scope(Scratch::kMatmul);
  if (takes_timed(grad, weight)) {
    const at::Tensor result = at::empty({grad.size(0), weight.size(1)}, grad.options());
    if (with_epilogue(EpilogueProduct::kGradRows, grad, weight, result, {}, {})) return result;
  }
  const at::Tensor g = operand(grad);
  const at::Tensor product = kLinearProduct.on(g)({cpu::Product::kPlain, g, operand(weight)});
  return product.to(grad.scalar_type());
}

AffineGrads affine_grads(const at::Tensor& grad, const at::Tensor& rows, const AffineGrads& memory) {
  if (has_epilogues(grad)) {
    OpMark mark("kiln::affine_grad_weight", grad, rows);
    const ScratchScope scope(Scratch::kMatmul);
    AffineGrads grads{memory_like(memory.weight, {grad.size(1), rows.size(1)}, grad),
                      memory_like(memory.bias, {grad.size(1)}, grad)};
    if (with_epilogue(EpilogueProduct::kGradWeight, grad, rows, grads.weight, grads.bias, {})) return grads;
  }
  const at::Tensor bias = affine_grad_bias(grad, memory.bias);
  return {affine_grad_weight(grad, rows, memory.weight), bias};
}

GeluResult affine_gelu(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& bias) {
  if (has_epilogues(rows)) {
    OpMark mark("kiln::affine_gelu", rows, weight, bias);
    const ScratchScope scope(Scratch::kMatmul);
    const at::Tensor hidden = at::empty({rows.size(0), weight.size(0)}, rows.options());
    const at::Tensor activation = at::empty_like(hidden);
    mark.outputs(hidden, activation);
    if (with_epilogue(EpilogueProduct::kAffineGelu, rows, weight, activation, bias, hidden))
      return {hidden, activation};
  }
  GeluResult result{.hidden = affine(rows, weight, bias), .activation = {}};
  result.activation = at::empty_like(result.hidden);
  gelu_tanh_forward(result.hidden, result.activation);
  return result;
}

HiddenGrads affine_grad_rows_gelu(const at::Tensor& grad, const at::Tensor& weight, const at::Tensor& hidden,
                                  const at::Tensor& bias_memory) {
  if (has_epilogues(grad)) {
    OpMark mark("kiln::affine_grad_rows_gelu", grad, weight, hidden);
    const ScratchScope scope(Scratch::kMatmul);
    HiddenGrads grads{at::empty_like(hidden), memory_like(bias_memory, {hidden.size(1)}, grad)};
    mark.outputs(grads.hidden, grads.bias);
    if (with_epilogue(EpilogueProduct::kGradRowsGelu, grad, weight, grads.hidden, grads.bias, hidden))
      return grads;
  }
  HiddenGrads grads{.hidden = affine_grad_rows(grad, weight), .bias = {}};
  gelu_tanh_backward(grads.hidden, hidden, grads.hidden);
  grads.bias = affine_grad_bias(grads.hidden, bias_memory);
  return grads;
}

}  // namespace kiln::ops
