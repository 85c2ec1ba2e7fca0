// Computes the gradient of a packed projection from those of its parts, in one pass, 16 bytes at a time,
// written in memory order.
#include "ops/cuda/elements.cuh"
#include "ops/cuda/kernels.h"

namespace kiln::ops::cuda {
namespace {

constexpr int kThreads = 256;

struct PackedShape {
  size_t num_tokens, num_heads, head_packs, total;  // packs of N elements: along a head, and altogether
};

template <class T, int N>
__global__ void pack_heads_kernel(HeadGrads grads, PackedShape shape, T* packed) {
  const size_t i = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= shape.total) {
    return;
  }
  size_t rest = i;  // the index of a pack: (((b * tokens + n) * 3 + part) * heads + h) * head_packs + pack
  const size_t pack = rest % shape.head_packs;
  rest /= shape.head_packs;
  const size_t head = rest % shape.num_heads;
  rest /= shape.num_heads;
  const int part = static_cast<int>(rest % 3);
  rest /= 3;
  const size_t token = rest % shape.num_tokens, batch = rest / shape.num_tokens;
  // Chosen by conditions: an index would move the arguments to local memory.
  const void* data = part == 0 ? grads.data[0] : part == 1 ? grads.data[1] : grads.data[2];
  const auto stride = [part](const size_t(&strides)[3]) {
    return part == 0 ? strides[0] : part == 1 ? strides[1] : strides[2];
  };
  const T* from = static_cast<const T*>(data) + batch * stride(grads.batch_stride) +
                  head * stride(grads.head_stride) + token * stride(grads.token_stride) + pack * N;
  *reinterpret_cast<Pack<T, N>*>(packed + i * N) = *reinterpret_cast<const Pack<T, N>*>(from);
}

template <int N, class T>
bool allows_packs(const HeadGrads& grads, const T* packed, size_t head_dim) {
  bool allowed = is_aligned_for<N>(packed) && head_dim % N == 0;
  for (int part = 0; part < 3; ++part) {
    allowed = allowed && is_aligned_for<N>(static_cast<const T*>(grads.data[part])) &&
              grads.batch_stride[part] % N == 0 && grads.head_stride[part] % N == 0 &&
              grads.token_stride[part] % N == 0;
  }
  return allowed;
}

}  // namespace
}  // namespace kiln::ops::cuda

using namespace kiln::ops::cuda;  // NOLINT: the C interface below is this file's only other content

int kiln_cuda_pack_heads(const kiln::ops::HeadGrads* grads, kiln::Dtype dtype, void* packed, size_t batch,
                         size_t num_tokens, size_t num_heads, size_t head_dim, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  with_element(dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int kPack = 16 / sizeof(T);
    T* to = static_cast<T*>(packed);
    const bool packs = allows_packs<kPack>(*grads, to, head_dim);
    const size_t head_packs = packs ? head_dim / kPack : head_dim;
    const PackedShape shape{num_tokens, num_heads, head_packs,
                            batch * num_tokens * 3 * num_heads * head_packs};
    launch(packs ? pack_heads_kernel<T, kPack> : pack_heads_kernel<T, 1>,
           dim3(blocks_for(shape.total, kThreads)), dim3(kThreads), s, *grads, shape, to);
  });
  return last_error();
}
