// What the tests of emulated kernels share: memory that shows what a kernel did not write, and both orders of
// threads.
#pragma once
#include <functional>
#include <limits>

#include "core/tensors.h"
#include "cuda_emulation/order.h"
#include "ops/checks.h"

namespace kiln::ops {

inline Dtype dtype_of(const at::Tensor& tensor) { return from_scalar_type(tensor.scalar_type()); }

// An unwritten element shows, and so does one written beyond the end.
inline at::Tensor poisoned(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::full(sizes, std::numeric_limits<double>::quiet_NaN(), dtype);
}

inline void* data(const at::Tensor& tensor) { return tensor.defined() ? tensor.mutable_data_ptr() : nullptr; }

// `run` gives the same bits whichever thread comes first: no thread reads what another one of its block
// writes without a barrier between.
inline Tensors in_both_orders(const std::function<Tensors()>& run) {
  emulation::set_order(emulation::Order::kDescending);
  const Tensors backwards = run();
  emulation::set_order(emulation::Order::kAscending);
  const Tensors forwards = run();
  SCOPED_TRACE("a race");
  expect_same_bits(forwards, backwards);
  return forwards;
}

// A copy that begins `by` elements beyond its memory's alignment.
inline at::Tensor shifted(const at::Tensor& tensor, int64_t by) {
  const at::Tensor flat = at::empty({tensor.numel() + by}, tensor.options());
  return flat.narrow(0, by, tensor.numel()).view(tensor.sizes()).copy_(tensor);
}

}  // namespace kiln::ops
