// Stochastic rounding to bf16, with the draws of ops/update/stochastic_round.h. 128 values make a group of 16
// Philox blocks; word w of block b serves value 32 w + 2 b and the next one. A thread computes one block, so
// 16 neighbouring threads read and write dense memory four times.
#include "ops/cuda/elements.cuh"
#include "ops/cuda/kernels.h"

namespace kiln::ops::cuda {
namespace {

constexpr int kThreads = 256;
constexpr uint64_t kBlocks = 16, kGroup = 128;  // Philox blocks and values of a group

struct Words {
  uint32_t w[4];
};

struct Key {
  uint32_t k0, k1;
};

// Philox4x32-10 (core/philox.h).
__device__ Words philox(Words c, Key key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c.w[0],
                   p1 = static_cast<uint64_t>(0xCD9E8D57u) * c.w[2];
    c = {{static_cast<uint32_t>(p1 >> 32) ^ c.w[1] ^ key.k0, static_cast<uint32_t>(p1),
          static_cast<uint32_t>(p0 >> 32) ^ c.w[3] ^ key.k1, static_cast<uint32_t>(p0)}};
    key.k0 += 0x9E3779B9u;
    key.k1 += 0xBB67AE85u;
  }
  return c;
}

__device__ uint16_t rounded_bits(float value, uint32_t random) {
  const uint32_t bits = __float_as_uint(value);
  return static_cast<uint16_t>((value != value ? bits | 0x400000u : bits + random) >> 16);
}

// values[0] has position `first` in its unit and lies in group `first_group`.
__global__ void stochastic_round_kernel(const float* values, uint16_t* rounded, uint64_t first, uint64_t n,
                                        uint64_t first_group, Key key, uint32_t draw, uint64_t index) {
  const uint64_t block = first_group * kBlocks + static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const Words words = philox({{static_cast<uint32_t>(block), draw, static_cast<uint32_t>(index),
                               static_cast<uint32_t>(index >> 32)}},
                             key);
  const uint64_t begin = block / kBlocks * kGroup + block % kBlocks * 2;
#pragma unroll
  for (uint64_t w = 0; w < 4; ++w) {
    for (uint64_t half = 0; half < 2; ++half) {
      const uint64_t place = begin + 32 * w + half;
      if (place >= first && place < first + n) {
        rounded[place - first] = rounded_bits(values[place - first], words.w[w] >> (16 * half) & 0xFFFFu);
      }
    }
  }
}

}  // namespace
}  // namespace kiln::ops::cuda

using namespace kiln::ops::cuda;  // NOLINT: the C interface below is this file's only other content

int kiln_cuda_stochastic_round(const float* values, void* rounded, size_t n, uint64_t first, uint64_t seed,
                               uint32_t draw, uint64_t index, void* stream) {
  const uint64_t first_group = first / kGroup, groups = (first + n + kGroup - 1) / kGroup - first_group;
  const Key key{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  launch(stochastic_round_kernel, dim3(blocks_for(groups * kBlocks, kThreads)), dim3(kThreads),
         static_cast<cudaStream_t>(stream), values, static_cast<uint16_t*>(rounded), first, uint64_t{n},
         first_group, key, draw, index);
  return last_error();
}
