#include "ops/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/instruction_set.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <sys/syscall.h>
#include <unistd.h>

#include "core/cpu_level.h"
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

// Linux gives a process the tiles' registers on request.
bool has_matrix_tiles() {
  static const bool has = [] {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return cpu_level() >= CpuLevel::kAmx && ::syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return has;
}

}  // namespace kiln::ops::cpu
#endif
