// kiln extract: pictures -> feature store, and their captions -> text store.
#pragma once
#include "extract/extract_options.h"
#include "parallel/ranks/process_group.h"

namespace kiln {

// Without an autoencoder the store must be complete, and text is added to it.
//
// Continues what an earlier run of the same settings left in `out`: the store's bytes are those of an
// uninterrupted run. SIGINT and SIGTERM end it after the batch in hand. Several ranks take whole batches of
// the pictures in turn of place: the store is the one that a single rank makes, in other shards. Throws
// Error: nothing to read, impossible options, a store of other settings, a broken picture when strict.
void extract(const ExtractOptions& options, ProcessGroup& group);

}  // namespace kiln
