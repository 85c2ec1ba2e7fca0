// Whether a run fits, how fast it is and what it costs, without running it: `kiln plan`. Needs no torch.
#pragma once
#include "kiln/options.h"

namespace kiln::v0 {

struct PlanRequest {
  Options options;          // of the run; "data" and "out" may be left out
  std::string gpu = "cpu";  // a name of `kiln plan --help`; "cpu": this machine's processor
  int64_t gpus = 1;
  double price_per_gpu_hour = 0;  // in any currency; 0: unknown
};

// Of one device: bytes, and seconds of a step of the whole run.
struct Plan {
  bool fits = false;
  int64_t memory_bytes = 0;                      // that programs can allocate
  int64_t needed_bytes = 0;                      // the most that any phase needs
  int64_t peak_bytes = 0;                        // of tensors at the peak of a step
  std::map<std::string, int64_t> bytes_by_kind;  // of peak_bytes: "weights", "activations", ...
  int64_t num_weights = 0;                       // trainable
  double step_seconds = 0, images_per_second = 0;
  double days = 0, cost = 0;  // of the whole run
  std::string text, json;     // what `kiln plan` prints, without and with --json
};

Plan plan(const PlanRequest& request);

}  // namespace kiln::v0
