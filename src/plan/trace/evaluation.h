// What evaluations in training (--evaluate-every) hold: the feature net and the statistics of the reference
// all along, and what one evaluation takes beside its drawing.
#pragma once
#include <cstdint>
#include <string>

#include "core/dry_run.h"
#include "step/span.h"
#include "train/setup.h"

namespace kiln {

struct EvaluationTrace {
  int64_t net_bytes = 0;        // on the device, from before the state is built
  int64_t reference_bytes = 0;  // on the host likewise: its statistics and features
  MemoryEvents judge{};    // on the device: pictures through the net; on a CPU statistics and metrics, too
  int64_t host_bytes = 0;  // at most, of statistics and metrics; on a CPU they are in `judge`
  std::string note{};      // what is not known of it; "" for nothing
};
// On one of `world_size` ranks. REQUIRES: the run evaluates. Throws Error: an unknown net.
EvaluationTrace trace_evaluation(const TrainOptions& options, DryRunDevice device, int64_t world_size);

// Bytes of the feature net's weights; 0: the run does not evaluate.
int64_t feature_net_bytes(const TrainOptions& options);

}  // namespace kiln
