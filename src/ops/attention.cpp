#include <ATen/ATen.h>

#include "core/error.h"
#include "ops/ops.h"

namespace kiln::ops {
namespace reference {

at::Tensor packed_attention(const at::Tensor& qkv, double scale) {
  const at::ScalarType dtype = qkv.scalar_type();
  const bool upcast = dtype == at::kHalf && qkv.device().is_cpu();
  const at::Tensor heads = (upcast ? qkv.to(at::kFloat) : qkv).permute({2, 0, 3, 1, 4});  // (3, B, H, N, d)
  const at::Tensor scores = at::matmul(heads[0], heads[1].transpose(-2, -1)) * scale;      // (B, H, N, N)
  const at::ScalarType softmax_dtype = scores.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor weights = at::softmax(scores, -1, softmax_dtype).to(heads.scalar_type());
  return at::matmul(weights, heads[2]).transpose(1, 2).flatten(2).to(dtype);
}

}  // namespace reference

at::Tensor packed_attention(const at::Tensor& qkv, double scale) {
  return reference::packed_attention(qkv, scale);
}

}  // namespace kiln::ops
