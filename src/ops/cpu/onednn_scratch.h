// How products are divided among threads, and the scratch that oneDNN takes from the tensor allocator inside
// a matrix product or a convolution. A dry run on meta tensors would otherwise not see it.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace kiln::ops::cpu {

enum class Product {
  kAffine,      // rows (m, k) @ weight (n, k)^T + bias
  kAdded,       // rows (m, k) @ weight (n, k)^T, added to the result, as in a convolution of ATen's own
  kPlain,       // (m, k) @ (k, n)
  kTransposed,  // (k, m)^T @ (k, n)
};

// A product that several threads compute piece by piece: each piece is some rows or some columns of the
// result, computed by one thread. The inner product is never divided, so pieces have the bits of the whole.
struct ProductPieces {
  int64_t count = 1;  // 1: oneDNN divides the product among all threads in its own way
  int64_t size = 0;   // rows or columns of a piece
  bool of_rows = true;
};

// Returns the pieces of an (m, n) result with an inner product over k. Their borders do not depend on the
// number of threads. There is one piece where there would be too few for this process's threads.
ProductPieces product_pieces(Product product, at::ScalarType dtype, int64_t m, int64_t n, int64_t k);

// Returns the scratch bytes of an (m, n) result with an inner product over k in f32 or bf16, for this
// process's number of threads; those of pieces if it is computed so.
int64_t product_scratch_bytes(Product product, at::ScalarType dtype, int64_t m, int64_t n, int64_t k);

// A convolution of x (B, C, H, W) with weight (O, C / groups, kh, kw) to out (B, O, h, w), in f32 or bf16.
struct ConvolutionSize {
  at::ScalarType dtype = at::kFloat;
  int64_t batch = 1, in_channels = 1, out_channels = 1, kernel_elements = 1;  // kh * kw
  int64_t in_height = 1, in_width = 1, out_pixels = 1;                        // of one sample; h * w
  int64_t padding = 0, groups = 1;
  bool is_strided = false;
};

// Each returns the bytes beside its results at the peak, for this process's number of threads. The results
// are that of the forward, the gradient of x, and the gradients of the weight and the bias.
int64_t convolution_scratch_bytes(const ConvolutionSize& size);
int64_t convolution_grad_x_scratch_bytes(const ConvolutionSize& size);
int64_t convolution_grad_weight_scratch_bytes(const ConvolutionSize& size);

}  // namespace kiln::ops::cpu
