// What a step does to have room for activations.
#pragma once

namespace kiln {

// What happens to a segment's activations between its forward and its backward.
enum class Activations {
  kKeep,       // autograd saves them
  kRecompute,  // only the segment's input is kept; backward runs the forward again, to the same bits
  kOffload,    // as kRecompute, and the input's hidden tensor waits in host memory; on a CPU the same as
               // kRecompute
};
struct MemoryChoice {
  Activations activations = Activations::kKeep;
};

}  // namespace kiln
