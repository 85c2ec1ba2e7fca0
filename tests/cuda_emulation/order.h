// What tests ask of the emulation, free of CUDA's headers.
#pragma once

namespace kiln::emulation {

enum class Order { kAscending, kDescending };  // in which the threads of a block take turns
void set_order(Order order);

// A block of which half waits at a barrier. Throws std::logic_error.
void run_uneven_barrier();

}  // namespace kiln::emulation
