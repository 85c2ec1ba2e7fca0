// The instruction set that Highway has chosen, for kernels written in intrinsics.
#pragma once

// 1 if the compiler can build those of AVX-512.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define KILN_AVX512_KERNELS 1
#else
#define KILN_AVX512_KERNELS 0
#endif

namespace kiln::ops::cpu {

// True if it is AVX-512 with F, BW, CD, DQ and VL.
bool chosen_avx512();

// True if this processor has matrix tiles of bf16 (AMX) and the system lets the process use them.
bool has_matrix_tiles();

}  // namespace kiln::ops::cpu
