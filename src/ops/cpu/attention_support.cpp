#include <cpuid.h>

#include "ops/cpu/attention_kernel.h"
#include "ops/cpu/instruction_set.h"

namespace kiln::ops::cpu {

#if KILN_AVX512_ATTENTION
namespace {

// AMX with bf16 products: leaf 7 of CPUID, bits 24 and 22 of EDX.
bool has_matrix_tiles() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kTilesWithBf16 = 1u << 24 | 1u << 22;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & kTilesWithBf16) == kTilesWithBf16;
}

}  // namespace

bool attention_supported(AttentionType type, int64_t head_dim) {
  // Where there are matrix tiles, ATen's attention in bf16 uses them and is up to three times as fast.
  static const bool has_bf16 = __builtin_cpu_supports("avx512bf16") && !has_matrix_tiles();
  return chosen_avx512() && (type == AttentionType::kF32 || (has_bf16 && head_dim % 2 == 0));
}
#else
bool attention_supported(AttentionType, int64_t) { return false; }
#endif

}  // namespace kiln::ops::cpu
