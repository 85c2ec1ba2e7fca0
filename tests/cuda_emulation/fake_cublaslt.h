// A cuBLASLt that multiplies nothing, free of CUDA's headers.
#pragma once

namespace kiln::emulation {

// How it answers: it has an algorithm and starts it, it has none, or it refuses to start the one it has.
enum class CublasLt { kServes, kHasNone, kRefusesToStart };
void set_cublaslt(CublasLt answer);
// Returns how often algorithms were asked for, and which of those that it gave was started last, from 0.
int num_choices();
int last_algorithm();

}  // namespace kiln::emulation
