// What tests ask of the emulation, free of CUDA's headers.
#pragma once
#include <cstddef>
#include <functional>
#include <vector>

namespace kiln::emulation {

enum class Order { kAscending, kDescending };  // in which the threads of a block take turns
void set_order(Order order);

// Returns the number of blocks of each kernel that `launches` starts. Their threads do not run.
std::vector<size_t> blocks_of(const std::function<void()>& launches);

// A block of which half waits at a barrier. Throws std::logic_error.
void run_uneven_barrier();

}  // namespace kiln::emulation
