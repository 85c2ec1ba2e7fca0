// Memory that encoding texts takes, from a dry run of the encoder.
#pragma once
#include <cstdint>
#include <vector>

#include "models/text/text_encoder.h"

namespace kiln {

// Counts what one batch takes beside the weights.
struct BatchMemory {
  int64_t state_bytes = 0;  // what stays between two segments, at most
  int64_t peak_bytes = 0;   // while one computes, that included
};

// `encoder`: with weights on meta, of the dtypes they are to have. `host_offsets`: as in TokenRows. `device`:
// that is to compute.
BatchMemory planned_batch(const TextEncoder& encoder, const std::vector<int64_t>& host_offsets,
                          at::Device device);
// `batch` texts of `length` tokens each.
BatchMemory planned_batch(const TextEncoder& encoder, int64_t batch, int64_t length, at::Device device);

}  // namespace kiln
