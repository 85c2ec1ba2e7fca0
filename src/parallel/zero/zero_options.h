// How ZeRO divides the training state among ranks.
#pragma once
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>

namespace kiln {

struct ZeroOptions {
  int64_t stage = 0;
  int64_t persist_threshold = 0;   // stage 3: units with fewer elements keep their weights whole
  bool shard_within_node = false;  // divide among the ranks of a machine; machines hold copies
  int64_t prefetch_segments = 1;   // stage 3: segments gathered ahead of the one that computes
  int64_t reduce_bucket_size = 0;  // most elements per reduction of gradients; 0: a whole unit's
  std::optional<at::ScalarType> reduce_dtype{};  // of sums of gradients; none: their own
};

}  // namespace kiln
