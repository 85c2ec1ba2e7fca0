#include "ops/cpu/attention_kernel.h"
#include "ops/cpu/instruction_set.h"

namespace kiln::ops::cpu {

#if KILN_AVX512_ATTENTION
bool attention_supported(AttentionType type, int64_t head_dim) {
  static const bool has_bf16 = __builtin_cpu_supports("avx512bf16");
  return chosen_avx512() && (type == AttentionType::kF32 || (has_bf16 && head_dim % 2 == 0));
}
#else
bool attention_supported(AttentionType, int64_t) { return false; }
#endif

}  // namespace kiln::ops::cpu
