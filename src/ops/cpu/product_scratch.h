// Scratch that oneDNN takes from the tensor allocator inside a matrix product: what a dry run on meta tensors
// would otherwise not see.
#pragma once
#include <ATen/core/Tensor.h>

namespace kiln::ops::cpu {

enum class Product {
  kAffine,      // rows (m, k) @ weight (n, k)^T + bias
  kPlain,       // (m, k) @ (k, n)
  kTransposed,  // (k, m)^T @ (k, n)
};

// Bytes for an (m, n) result of an inner product over k in f32 or bf16, with this process's number of
// threads.
int64_t product_scratch_bytes(Product product, at::ScalarType dtype, int64_t m, int64_t n, int64_t k);

}  // namespace kiln::ops::cpu
