// The instruction set that Highway has chosen, for kernels written in intrinsics.
#pragma once

namespace kiln::ops::cpu {

// True if it is AVX-512 with F, BW, CD, DQ and VL.
bool chosen_avx512();

}  // namespace kiln::ops::cpu
