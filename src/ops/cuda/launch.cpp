#include "ops/cuda/launch.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>

#include "core/aten.h"
#include "core/error.h"
#include "core/tensors.h"
#include "ops/cuda/kernels.h"

namespace kiln::ops::cuda {

#ifdef KILN_CUDA_KERNELS

bool kernels_compiled() { return true; }

int capability() { return kiln_cuda_capability(); }

namespace {

// Calls `launch(stream)` on the device of `tensor` and its current stream. The stream comes through c10's
// device interface, so this file needs no CUDA header.
template <class Launch>
void enqueue(const char* kernel, const at::Tensor& tensor, const Launch& launch) {
  const c10::DeviceGuard guard(tensor.device());
  const c10::Stream stream = c10::impl::VirtualGuardImpl(at::kCUDA).getStream(tensor.device());
  const int error = launch(stream.native_handle());
  if (error == 0) return;
  char text[256];
  kiln_cuda_error_text(error, text, sizeof text);
  fail(kernel, "the CUDA kernel failed to start: {}", text);
}

Dtype dtype_of(const at::Tensor& tensor) { return from_scalar_type(tensor.scalar_type()); }

std::atomic<bool> takes_fastest{false};

}  // namespace

void gelu_tanh(const at::Tensor& in, const at::Tensor& out) {
  enqueue("gelu_tanh", in, [&](void* stream) {
    return kiln_cuda_gelu_tanh(dtype_of(in), in.const_data_ptr(), out.mutable_data_ptr(), in.numel(), stream);
  });
}

void gelu_tanh_grad(const at::Tensor& grad, const at::Tensor& in, const at::Tensor& grad_in) {
  enqueue("gelu_tanh_grad", in, [&](void* stream) {
    return kiln_cuda_gelu_tanh_grad(dtype_of(in), grad.const_data_ptr(), in.const_data_ptr(),
                                    grad_in.mutable_data_ptr(), in.numel(), stream);
  });
}

bool serves_rows(const at::Tensor& x, at::ScalarType low) {
  return x.size(2) <= kWidestRow && (x.scalar_type() == at::kFloat || x.scalar_type() == low);
}

void adaln(const AdalnArgs& args, const GatedResidualArgs& branch, const at::Tensor& x_in,
           const at::Tensor& x_out, const at::Tensor& out) {
  enqueue("adaln", out, [&](void* stream) {
    return kiln_cuda_adaln(&args, &branch, x_in.const_data_ptr(),
                           branch.y == nullptr ? nullptr : x_out.mutable_data_ptr(), out.mutable_data_ptr(),
                           dtype_of(out), out.size(0), stream);
  });
}

void adaln_grad(const AdalnArgs& args, const GatedResidualArgs& branch, const AdalnGrads& grads,
                const at::Tensor& grad, const at::Tensor& partials, int64_t rows_per_partial) {
  enqueue("adaln_grad", grad, [&](void* stream) {
    return kiln_cuda_adaln_grad(&args, &branch, &grads, dtype_of(grad), partials.mutable_data_ptr<float>(),
                                rows_per_partial, grad.size(0), stream);
  });
}

void gated_residual(const GatedResidualArgs& args, const at::Tensor& x, const at::Tensor& out) {
  enqueue("gated_residual", x, [&](void* stream) {
    return kiln_cuda_gated_residual(&args, x.const_data_ptr(), out.mutable_data_ptr(), dtype_of(x), x.size(0),
                                    stream);
  });
}

void gated_residual_grad(const GatedResidualArgs& args, const at::Tensor& grad, const at::Tensor& dy,
                         const at::Tensor& dgate, const at::Tensor& partials, int64_t rows_per_partial) {
  enqueue("gated_residual_grad", grad, [&](void* stream) {
    return kiln_cuda_gated_residual_grad(&args, grad.const_data_ptr(), dtype_of(grad), dy.mutable_data_ptr(),
                                         dgate.mutable_data_ptr(), partials.mutable_data_ptr<float>(),
                                         rows_per_partial, grad.size(0), stream);
  });
}

void group_norm(const GroupNormArgs& args, const at::Tensor& out, const at::Tensor& partials) {
  enqueue("group_norm", out, [&](void* stream) {
    return kiln_cuda_group_norm(&args, out.mutable_data_ptr(), partials.mutable_data_ptr<float>(),
                                out.size(0), stream);
  });
}

void group_norm_grad(const GroupNormArgs& args, const GroupNormGradArgs& grads, const at::Tensor& grad) {
  enqueue("group_norm_grad", grad,
          [&](void* stream) { return kiln_cuda_group_norm_grad(&args, &grads, grad.size(0), stream); });
}

bool epilogue_product(const EpilogueProductArgs& args, const at::Tensor& workspace) {
  bool is_served = true;
  enqueue("epilogue_product", workspace, [&](void* stream) {
    const int error =
        kiln_cuda_epilogue_product(&args, workspace.mutable_data_ptr(), workspace.nbytes(), stream);
    is_served = error != kEpilogueNotServed;
    return is_served ? error : 0;
  });
  return is_served;
}

void take_epilogue_algorithm(int nth) {
  static_assert(kNumEpilogueAlgorithms == static_cast<int>(kEpilogueAlgorithms) &&
                kFastestEpilogueAlgorithm == static_cast<int>(kFastestAlgorithm));
  kiln_cuda_take_epilogue_algorithm(nth);
  takes_fastest = nth == kFastestEpilogueAlgorithm;
}

bool times_epilogue_algorithms() { return takes_fastest; }

void set_product_choices(const std::vector<ProductChoice>& choices) {
  for (const ProductChoice& choice : choices) kiln_cuda_set_product_choice(&choice);
}

std::vector<ProductChoice> product_choices() {
  std::vector<ProductChoice> choices(kiln_cuda_product_choices(nullptr, 0));
  choices.resize(std::min(choices.size(), kiln_cuda_product_choices(choices.data(), choices.size())));
  return choices;
}

int64_t cublaslt_version() { return static_cast<int64_t>(kiln_cuda_cublaslt_version()); }

std::vector<EpilogueCount> epilogue_counts() {
  std::vector<EpilogueCount> counts;
  for (int i = 0; i < kNumEpilogueProducts; ++i) {
    EpilogueCount& count = counts.emplace_back(EpilogueCount{kEpilogueProductNames[i], 0, 0});
    kiln_cuda_epilogue_counts(static_cast<EpilogueProduct>(i), &count.served, &count.refused);
  }
  return counts;
}

void to_fp8(const at::Tensor& values, float format_largest, const at::Tensor& scale, at::ScalarType format,
            const at::Tensor& rows, const at::Tensor& columns) {
  const at::Tensor partials = at::empty({kFp8Partials}, values.options().dtype(at::kInt));
  const auto data = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
  };
  float* device_scale = scale.mutable_data_ptr<float>();
  enqueue("fp8_scale", values, [&](void* stream) {
    return kiln_cuda_fp8_scale(dtype_of(values), values.const_data_ptr(), values.numel(), format_largest,
                               static_cast<unsigned*>(partials.mutable_data_ptr()), device_scale, stream);
  });
  enqueue("fp8_convert", values, [&](void* stream) {
    return kiln_cuda_fp8_convert(dtype_of(values), values.const_data_ptr(), values.size(0), values.size(1),
                                 device_scale, format == at::kFloat8_e5m2, data(rows), data(columns), stream);
  });
}

at::Tensor pack_heads(const at::Tensor& grad_q, const at::Tensor& grad_k, const at::Tensor& grad_v) {
  const int64_t batch = grad_q.size(0), num_heads = grad_q.size(1), num_tokens = grad_q.size(2),
                head_dim = grad_q.size(3);
  at::Tensor packed = at::empty({batch, num_tokens, 3, num_heads, head_dim}, grad_q.options());
  HeadGrads grads;
  const at::Tensor parts[3] = {grad_q, grad_k, grad_v};
  for (int i = 0; i < 3; ++i) {
    TORCH_INTERNAL_ASSERT(parts[i].sizes() == grad_q.sizes() && (head_dim == 1 || parts[i].stride(3) == 1));
    grads.data[i] = parts[i].const_data_ptr();
    grads.batch_stride[i] = static_cast<size_t>(parts[i].stride(0));
    grads.head_stride[i] = static_cast<size_t>(parts[i].stride(1));
    grads.token_stride[i] = static_cast<size_t>(parts[i].stride(2));
  }
  if (packed.numel() == 0) return packed;
  enqueue("pack_heads", packed, [&](void* stream) {
    return kiln_cuda_pack_heads(&grads, dtype_of(packed), packed.mutable_data_ptr(), batch, num_tokens,
                                num_heads, head_dim, stream);
  });
  return packed;
}

bool attention_grads(const at::Tensor& qkv, const at::Tensor& out, const at::Tensor& log_sum,
                     const at::Tensor& grad_out, double scale, const at::Tensor& grad_qkv) {
  const AttentionGradsArgs args{.dtype = dtype_of(qkv),
                                .batch = static_cast<size_t>(qkv.size(0)),
                                .num_tokens = static_cast<size_t>(qkv.size(1)),
                                .num_heads = static_cast<size_t>(qkv.size(3)),
                                .head_dim = static_cast<size_t>(qkv.size(4)),
                                .qkv = qkv.const_data_ptr(),
                                .out = out.const_data_ptr(),
                                .grad_out = grad_out.const_data_ptr(),
                                .log_sum = log_sum.const_data_ptr<float>(),
                                .scale = static_cast<float>(scale),
                                .grad_qkv = grad_qkv.mutable_data_ptr()};
  size_t scratch_bytes = 0;
  bool is_served = true;
  const auto served = [&](int error) {
    is_served = error != kAttentionNotServed;
    return is_served ? error : 0;
  };
  enqueue("attention_grads", qkv,
          [&](void*) { return served(kiln_cuda_attention_grads_scratch(&args, &scratch_bytes)); });
  if (!is_served) return false;
  const at::Tensor scratch = at::empty({static_cast<int64_t>(scratch_bytes)}, qkv.options().dtype(at::kByte));
  enqueue("attention_grads", qkv, [&](void* stream) {
    return served(kiln_cuda_attention_grads(&args, scratch.mutable_data_ptr(), stream));
  });
  return is_served;
}

void step_scale(const at::Tensor& sum_of_squares, const at::Tensor& losses, double max_norm,
                double loss_scale, const at::Tensor& scale) {
  enqueue("step_scale", scale, [&](void* stream) {
    return kiln_cuda_step_scale(sum_of_squares.const_data_ptr<double>(), losses.const_data_ptr<double>(),
                                losses.numel(), max_norm, loss_scale, scale.mutable_data_ptr<float>(),
                                stream);
  });
}

void adamw(const AdamwElements& elements, const AdamwFactors& factors, const at::Tensor& master) {
  enqueue("adamw", master,
          [&](void* stream) { return kiln_cuda_adamw(&elements, &factors, master.numel(), stream); });
}

void stochastic_round(const at::Tensor& values, const at::Tensor& rounded, uint64_t first, uint64_t seed,
                      uint32_t draw, uint64_t index) {
  enqueue("stochastic_round", values, [&](void* stream) {
    return kiln_cuda_stochastic_round(values.const_data_ptr<float>(), rounded.mutable_data_ptr(),
                                      values.numel(), first, seed, draw, index, stream);
  });
}

void sum_of_squares(const at::Tensor& flat, const at::Tensor& sum) {
  const at::Tensor partials = at::empty({kSumOfSquaresPartials}, sum.options());
  enqueue("sum_of_squares", flat, [&](void* stream) {
    return kiln_cuda_sum_of_squares(dtype_of(flat), flat.const_data_ptr(), flat.numel(),
                                    partials.mutable_data_ptr<double>(), sum.mutable_data_ptr<double>(),
                                    stream);
  });
}

#else

bool kernels_compiled() { return false; }
int capability() { return 0; }

namespace {
[[noreturn]] void missing() { TORCH_INTERNAL_ASSERT(false, "this build has no CUDA kernels"); }
}  // namespace

void gelu_tanh(const at::Tensor&, const at::Tensor&) { missing(); }
void gelu_tanh_grad(const at::Tensor&, const at::Tensor&, const at::Tensor&) { missing(); }
bool serves_rows(const at::Tensor&, at::ScalarType) { return false; }
void adaln(const AdalnArgs&, const GatedResidualArgs&, const at::Tensor&, const at::Tensor&,
           const at::Tensor&) {
  missing();
}
void adaln_grad(const AdalnArgs&, const GatedResidualArgs&, const AdalnGrads&, const at::Tensor&,
                const at::Tensor&, int64_t) {
  missing();
}
void group_norm(const GroupNormArgs&, const at::Tensor&, const at::Tensor&) { missing(); }
void group_norm_grad(const GroupNormArgs&, const GroupNormGradArgs&, const at::Tensor&) { missing(); }
bool epilogue_product(const EpilogueProductArgs&, const at::Tensor&) { return false; }
std::vector<EpilogueCount> epilogue_counts() { return {}; }
void take_epilogue_algorithm(int) {}
bool times_epilogue_algorithms() { return false; }
void set_product_choices(const std::vector<ProductChoice>&) {}
std::vector<ProductChoice> product_choices() { return {}; }
int64_t cublaslt_version() { return 0; }
void to_fp8(const at::Tensor&, float, const at::Tensor&, at::ScalarType, const at::Tensor&,
            const at::Tensor&) {
  missing();
}
bool attention_grads(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, double,
                     const at::Tensor&) {
  return false;
}
at::Tensor pack_heads(const at::Tensor&, const at::Tensor&, const at::Tensor&) { missing(); }
void step_scale(const at::Tensor&, const at::Tensor&, double, double, const at::Tensor&) { missing(); }
void gated_residual(const GatedResidualArgs&, const at::Tensor&, const at::Tensor&) { missing(); }
void gated_residual_grad(const GatedResidualArgs&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                         const at::Tensor&, int64_t) {
  missing();
}
void adamw(const AdamwElements&, const AdamwFactors&, const at::Tensor&) { missing(); }
void stochastic_round(const at::Tensor&, const at::Tensor&, uint64_t, uint64_t, uint32_t, uint64_t) {
  missing();
}
void sum_of_squares(const at::Tensor&, const at::Tensor&) { missing(); }

#endif

}  // namespace kiln::ops::cuda
