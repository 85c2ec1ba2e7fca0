// kiln extract: pictures -> feature store, and their captions -> text store.
#pragma once
#include "extract/settings.h"
#include "parallel/ranks/process_group.h"

namespace kiln {

// Without an autoencoder the store must be complete, and only text is added to it.
//
// Continues what an earlier run of the same settings left in `out`: the store's bytes are those of an
// uninterrupted run. SIGINT and SIGTERM end it after the current batch. Each of several ranks takes whole
// batches, which follow each other: the samples are those that a single rank makes, in other shards. Throws
// Error: nothing to read, impossible options, a store of other settings, a broken picture when strict.
void extract(const ExtractOptions& options, ProcessGroup& group);

}  // namespace kiln
