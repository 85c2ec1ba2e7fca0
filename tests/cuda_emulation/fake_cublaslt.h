// A cuBLASLt that multiplies nothing, free of CUDA's headers.
#pragma once
#include <array>

namespace kiln::emulation {

// How it answers: it has an algorithm and starts it, it has none, or it refuses to start the one it has.
enum class CublasLt { kServes, kHasNone, kRefusesToStart };
void set_cublaslt(CublasLt answer);
// Returns how often algorithms were asked for, and which of those that it gave was started last, from 0.
int num_choices();
int last_algorithm();
int num_products();  // that were started

// The milliseconds that each algorithm takes from now on; a negative one refuses to start.
void set_milliseconds(const std::array<float, 8>& of_algorithms);
// Streams are being recorded into a graph, so that nothing may be timed.
void set_recording(bool recording);

}  // namespace kiln::emulation
