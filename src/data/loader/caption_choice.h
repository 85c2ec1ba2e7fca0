// Which captions a batch has. Torch-free.
#pragma once
#include <cstdint>
#include <vector>

#include "data/loader/batch.h"
#include "data/text_store/text_store.h"

namespace kiln {

// Which caption each row of a batch has.
struct CaptionChoice {
  std::vector<int64_t> entries;  // the empty caption's for a dropped one that the model has no null rows for
  std::vector<uint8_t> dropped;  // 1: the model's learned null rows stand for it
};

// Draws by the rows' positions in the stream. A sample without a caption counts as dropped. REQUIRES: the
// batch has its sample_ids.
CaptionChoice choose_captions(const TextStore& text, const BatchOptions& options, const Batch& batch);

}  // namespace kiln
