// The instructions of the processor that products and kernels use. The environment variable KILN_CPU lowers
// them, for Kiln's kernels, ATen and oneDNN together. So one machine shows what older ones compute.
// Torch-free.
#pragma once
#include <string>
#include <utility>

#include "core/choices.h"

namespace kiln {

// From the least to the most. Each includes those before it.
enum class CpuLevel {
  kPortable,    // what every x86-64 processor has
  kAvx2,        // with FMA and F16C; bf16 is only stored
  kAvx512,      // with BW, CD, DQ and VL
  kAvx512Bf16,  // products of bf16
  kAmx,         // tiles of bf16
};

// The words of KILN_CPU.
template <>
struct Choices<CpuLevel> {
  static constexpr std::pair<CpuLevel, const char*> kAll[] = {{CpuLevel::kAvx2, "avx2"},
                                                              {CpuLevel::kAvx512, "avx512"},
                                                              {CpuLevel::kAvx512Bf16, "avx512_bf16"},
                                                              {CpuLevel::kAmx, "amx"}};
};

// Returns the best level of this processor.
CpuLevel cpu_level_of_machine();

// Returns the level in use: KILN_CPU's after lower_cpu_level(), else the machine's.
CpuLevel cpu_level();

// True from kAvx512Bf16 on: f32 is rounded to bf16 by one instruction. A variable, because kernels ask for
// every vector.
extern bool rounds_bf16_at_once;

// Returns the level's word, "x86-64" for kPortable.
std::string name_of(CpuLevel level);

// Lowers this process, and those it starts, to the level that KILN_CPU names; does nothing without it. Call
// it before the first kernel and the first product, when the libraries read their own variables. Throws Error
// if the word is unknown, if this processor lacks the level, or if a library's own variable is set without
// KILN_CPU: one library alone at a lower level fails in the middle of a run.
void lower_cpu_level();

}  // namespace kiln
