#include "ops/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/instruction_set.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "ops/cpu/instruction_set.h"

HWY_BEFORE_NAMESPACE();
namespace kiln::ops::cpu {
namespace HWY_NAMESPACE {
bool is_avx512() { return HWY_TARGET == HWY_AVX3; }
}  // namespace HWY_NAMESPACE
}  // namespace kiln::ops::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kiln::ops::cpu {
HWY_EXPORT(is_avx512);
bool chosen_avx512() { return HWY_DYNAMIC_DISPATCH(is_avx512)(); }
}  // namespace kiln::ops::cpu
#endif
