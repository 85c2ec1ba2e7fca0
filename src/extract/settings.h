// What the options of `kiln extract` come to on this machine.
#pragma once
#include <ATen/core/Tensor.h>

#include "extract/extract_options.h"
#include "extract/picture_lanes.h"

namespace kiln {

struct ExtractSettings {
  at::Device device = at::kCPU;
  at::ScalarType compute_dtype = at::kFloat;
  int64_t num_flips = 1;
  int64_t batch = 1;
  int num_workers = 1;  // threads that decode, of this rank
};
// `cpu_share`: processors of this rank (parallel/cpu_share.h). Throws Error: impossible values.
ExtractSettings resolve(const ExtractOptions& options, int64_t local_rank, int64_t cpu_share);

PictureLaneOptions lane_options_of(const ExtractOptions& options, const ExtractSettings& settings);

}  // namespace kiln
