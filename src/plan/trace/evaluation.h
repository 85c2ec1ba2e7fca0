// The memory of evaluations in training (--evaluate-every): the feature net and the statistics of the
// reference all along, and what one evaluation takes besides drawing its pictures.
#pragma once
#include <cstdint>
#include <string>

#include "core/dry_run.h"
#include "step/span.h"
#include "train/setup.h"

namespace kiln {

struct EvaluationTrace {
  int64_t net_bytes = 0;        // the net on the device, from before the state is built
  int64_t reference_bytes = 0;  // on the host, likewise: the reference's statistics and features
  MemoryEvents judge{};    // on the device: pictures through the net; on a CPU statistics and metrics, too
  int64_t host_bytes = 0;  // most of statistics and metrics; on a CPU they are in `judge`
  std::string note{};      // what is not known of it; "" if all is known
};
// Traces evaluations on one of `world_size` ranks. REQUIRES: the run evaluates. Throws Error for an unknown
// net.
EvaluationTrace trace_evaluation(const TrainOptions& options, DryRunDevice device, int64_t world_size);

// Returns the bytes of the feature net's weights; 0 if the run does not evaluate.
int64_t feature_net_bytes(const TrainOptions& options);

}  // namespace kiln
