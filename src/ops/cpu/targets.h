// Selects the instruction sets that the kernels are compiled for: AVX2, AVX-512, and portable code as the
// floor. The best one that the processor has is chosen at run time. Include this before any other Highway
// header.
#pragma once
#include <hwy/detect_targets.h>

#undef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
