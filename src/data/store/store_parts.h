// A feature store made by several ranks: each writes a store of its own, OUT/part-RRRRR-of-NNNNN, and one of
// them joins these without copying. Torch-free.
#pragma once
#include <cstdint>
#include <string>

#include "data/store/feature_store.h"

namespace kiln {

std::string store_part_folder(const std::string& out, int64_t rank, int64_t num_ranks);

// Creates OUT. Returns true if it is a complete store already; then removes what is left of its parts. Throws
// Error: OUT holds other things, or an extraction that another number of ranks began.
bool prepare_store_parts(const std::string& out, int64_t num_ranks);

// Makes OUT a complete store of the shards of all parts, in the order of ranks, and removes the parts. `info`
// has the store's settings. A part may be absent or empty. If this function is killed at any moment, it can
// be called again. Returns the number of samples. Throws Error: no samples at all.
int64_t join_store_parts(const std::string& out, int64_t num_ranks, StoreInfo info);

// Removes what an extraction by one or more ranks has left in a store without samples, and the folder if
// nothing else is in it. Throws Error: there are samples.
void remove_empty_store(const std::string& out);

}  // namespace kiln
