#include <ATen/core/grad_mode.h>

#include <cmath>

#include "core/aten.h"
#include "core/error.h"
#include "core/tensors.h"
#include "core/threads/parallel_pieces.h"
#include "ops/cpu/kernels.h"
#include "ops/cuda/launch.h"
#include "ops/kernel_args.h"
#include "ops/kernels.h"
#include "ops/op_mark.h"
#include "ops/ops.h"

namespace kiln::ops {
static c10::IValue mark_value(const std::vector<EmaSlice>& emas) {
  std::vector<at::Tensor> weights;
  weights.reserve(emas.size());
  for (const EmaSlice& ema : emas) weights.push_back(ema.weights);
  return weights;
}

namespace {

constexpr int64_t kAdamwPiece = 8192;  // elements

void check_flat(const char* name, const at::Tensor& tensor, const at::Tensor& master) {
  if (tensor.dim() != 1 || tensor.numel() != master.numel() || !tensor.is_contiguous() ||
      tensor.device() != master.device()) {
    fail("adamw_ema_step_", "{} must be flat and dense with {} elements on {}, got {} on {}", name,
         master.numel(), master.device().str(), c10::str(tensor.sizes()), tensor.device().str());
  }
}

void check_f32(const char* name, const at::Tensor& tensor, const at::Tensor& master) {
  check_flat(name, tensor, master);
  if (tensor.scalar_type() != at::kFloat) {
    fail("adamw_ema_step_", "{} must be f32, got {}", name, at::toString(tensor.scalar_type()));
  }
}

void check_arguments(const at::Tensor& master, const at::Tensor& grad, const at::Tensor& exp_avg,
                     const at::Tensor& exp_avg_sq, const std::vector<EmaSlice>& emas,
                     const at::Tensor* compute_weights, const AdamWStep& options) {
  check_f32("master", master, master);
  check_f32("exp_avg", exp_avg, master);
  check_f32("exp_avg_sq", exp_avg_sq, master);
  check_flat("grad", grad, master);
  for (const EmaSlice& ema : emas) {
    check_f32("an EMA", ema.weights, master);
  }
  if (!is_kernel_dtype(grad.scalar_type())) {
    fail("adamw_ema_step_", "grad must be f32, bf16 or fp16, got {}", at::toString(grad.scalar_type()));
  }
  if (compute_weights != nullptr) {
    check_flat("compute_weights", *compute_weights, master);
    if (!is_kernel_dtype(compute_weights->scalar_type()) || compute_weights->scalar_type() == at::kFloat) {
      fail("adamw_ema_step_", "compute_weights must be bf16 or fp16 (the f32 ones are the master), got {}",
           at::toString(compute_weights->scalar_type()));
    }
  }
  if (options.device_scale.defined() &&
      (options.device_scale.scalar_type() != at::kFloat || options.device_scale.numel() != 1 ||
       options.device_scale.device() != master.device())) {
    fail("adamw_ema_step_", "device_scale must be one f32 on {}, got {} on {}", master.device().str(),
         c10::str(options.device_scale.sizes()), options.device_scale.device().str());
  }
  if (options.step < 1) {
    fail("adamw_ema_step_", "step counts from 1, got {}", options.step);
  }
}

struct AdamWTensors {
  const at::Tensor &master, &grad, &exp_avg, &exp_avg_sq;
  const std::vector<EmaSlice>& emas;
  const at::Tensor* compute_weights;  // or null
};

// The memory of the tensors.
struct AdamwMemory {
  std::vector<float*> emas;
  std::vector<float> ema_steps;
  AdamwElements elements;

  AdamwMemory(const AdamWTensors& tensors, const float* device_scale) {
    for (const EmaSlice& ema : tensors.emas) {
      emas.push_back(ema.weights.mutable_data_ptr<float>());
      ema_steps.push_back(static_cast<float>(1 - ema.decay));
    }
    const at::Tensor* compute = tensors.compute_weights;
    elements = {.master = tensors.master.mutable_data_ptr<float>(),
                .grad = tensors.grad.const_data_ptr(),
                .grad_dtype = from_scalar_type(tensors.grad.scalar_type()),
                .exp_avg = tensors.exp_avg.mutable_data_ptr<float>(),
                .exp_avg_sq = tensors.exp_avg_sq.mutable_data_ptr<float>(),
                .compute_weights = compute ? compute->mutable_data_ptr() : nullptr,
                .compute_dtype = compute ? from_scalar_type(compute->scalar_type()) : Dtype::kF32,
                .emas = emas.data(),
                .ema_steps = ema_steps.data(),
                .num_emas = emas.size(),
                .device_scale = device_scale};
  }
};

void adamw_on_cpu(const AdamWTensors& tensors, const AdamWStep& options) {
  AdamwFactors factors = step_factors(options);
  if (options.device_scale.defined()) {
    factors.grad_scale = options.device_scale.item<float>();
    if (std::isnan(factors.grad_scale)) return;
  }
  const AdamwMemory memory(tensors, /*device_scale=*/nullptr);
  parallel_pieces(tensors.master.numel(), kAdamwPiece,
                  [&](int64_t begin, int64_t end) { cpu::adamw(memory.elements, factors, begin, end); });
}

void adamw_on_cuda(const AdamWTensors& tensors, const AdamWStep& options) {
  const at::Tensor& scale = options.device_scale;
  const AdamwMemory memory(tensors, scale.defined() ? scale.const_data_ptr<float>() : nullptr);
  cuda::adamw(memory.elements, step_factors(options), tensors.master);
}

constexpr Kernel<decltype(adamw_on_cpu)> kAdamw{.cpu = adamw_on_cpu, .cuda = adamw_on_cuda};

}  // namespace

AdamwFactors step_factors(const AdamWStep& o) {
  return {.grad_scale = static_cast<float>(o.grad_scale),
          .keep = static_cast<float>(1 - o.lr * o.weight_decay),
          .step_beta1 = static_cast<float>(1 - o.beta1),
          .beta2 = static_cast<float>(o.beta2),
          .step_beta2 = static_cast<float>(1 - o.beta2),
          .step_size = static_cast<float>(o.lr / (1 - std::pow(o.beta1, o.step))),
          .inv_sqrt_correction2 = static_cast<float>(1 / std::sqrt(1 - std::pow(o.beta2, o.step))),
          .eps = static_cast<float>(o.eps)};
}

void adamw_ema_step_(at::Tensor& master, const at::Tensor& grad, at::Tensor& exp_avg, at::Tensor& exp_avg_sq,
                     std::vector<EmaSlice>& emas, at::Tensor* compute_weights, const AdamWStep& options) {
  check_arguments(master, grad, exp_avg, exp_avg_sq, emas, compute_weights, options);
  OpMark mark("kiln::adamw_ema_step_", master, grad, exp_avg, exp_avg_sq, emas);
  mark.outputs(master, exp_avg, exp_avg_sq, emas, compute_weights ? *compute_weights : at::Tensor());
  if (master.numel() == 0) return;
  if (const auto kernel = kAdamw.serving(master))
    return kernel({master, grad, exp_avg, exp_avg_sq, emas, compute_weights}, options);
  TORCH_INTERNAL_ASSERT(!options.device_scale.defined());
  reference::adamw_ema_step_(master, grad, exp_avg, exp_avg_sq, emas, compute_weights, options);
}

namespace reference {

void adamw_ema_step_(at::Tensor& master, const at::Tensor& grad, at::Tensor& exp_avg, at::Tensor& exp_avg_sq,
                     std::vector<EmaSlice>& emas, at::Tensor* compute_weights, const AdamWStep& options) {
  at::NoGradGuard no_grad;
  const double correction1 = 1 - std::pow(options.beta1, options.step);
  const double correction2 = 1 - std::pow(options.beta2, options.step);
  const at::Tensor g = grad.to(at::kFloat) * options.grad_scale;
  master.mul_(1 - options.lr * options.weight_decay);
  exp_avg.lerp_(g, 1 - options.beta1);
  exp_avg_sq.mul_(options.beta2).addcmul_(g, g, 1 - options.beta2);
  master.addcdiv_(exp_avg, exp_avg_sq.sqrt() / std::sqrt(correction2) + options.eps,
                  -options.lr / correction1);
  for (EmaSlice& ema : emas) {
    ema.weights.lerp_(master, 1 - ema.decay);
  }
  if (compute_weights != nullptr) {
    compute_weights->copy_(master);
  }
}

}  // namespace reference
}  // namespace kiln::ops
