// The model that `kiln sample` draws with, loaded from any source of weights.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "models/autoencoders/autoencoder.h"
#include "models/model.h"
#include "models/model_record.h"
#include "parallel/ranks/process_group.h"
#include "sample/sample_options.h"

namespace kiln {

struct DrawingSource {
  // What the weights say of themselves, as the command overrides it and the published settings of the family
  // complete it. Its drawing is not completed.
  ModelRecord record;
  std::string weights;              // the file that was loaded
  std::string weights_fingerprint;  // of its bytes
  std::string average;              // what the weights are: "ema-0.9999" | "model" | "of the file"
  // What neither the weights nor the command say, and how it was settled: "objective flow, shift 3" as
  // published, "num_heads 16" by a usual value.
  std::vector<std::string> published{}, usual{};
  std::unique_ptr<Denoiser> denoiser;  // its weights in the compute dtype
  std::unique_ptr<Autoencoder> autoencoder;
};

// Puts the file that is drawn with in the place of a run, in --run or --weights, the same one on every rank
// while the run may go on saving: the first rank chooses and checks it. Throws Error: neither or both of
// --run and --weights, no run, no complete checkpoint.
void settle_weights(SampleCommand& command, ProcessGroup& group);

// `num_processes` is the number of processes on this machine, which share its memory. `command`:
// with settled weights. Throws Error: weights or an autoencoder that do not fit the model or each other.
DrawingSource load_drawing_source(const SampleCommand& command, at::Device device,
                                  at::ScalarType compute_dtype, int64_t num_processes);

}  // namespace kiln
