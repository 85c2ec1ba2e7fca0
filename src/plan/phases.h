// What happens on the device outside the step: building model and state, validation, drawing sample grids,
// encoding images. Traced on meta tensors like the step, on one of the ranks of `group` (dry_group).
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "core/dry_run.h"
#include "models/autoencoders/autoencoder_kl.h"
#include "train/setup.h"

namespace kiln {

// One allocation (bytes > 0) or free (bytes < 0, the same id).
struct DeviceEvent {
  uint64_t id = 0;
  int64_t bytes = 0;
};
using DeviceEvents = std::vector<DeviceEvent>;

// build_training: what it leaves alive is the persistent state.
DeviceEvents trace_load(const TrainOptions& options, const DataShape& data, DryRunDevice device,
                        const std::shared_ptr<ProcessGroup>& group);

// A sample grid but for its decoding: one batch through two steps of the sampler. Everything is freed at the
// end.
DeviceEvents trace_sample_grid(const TrainOptions& options, const DataShape& data, DryRunDevice device,
                               const std::shared_ptr<ProcessGroup>& group);
// One batch of a validation. Everything is freed at the end.
DeviceEvents trace_validation(const TrainOptions& options, const DataShape& data, DryRunDevice device,
                              const std::shared_ptr<ProcessGroup>& group);

struct AutoencoderEvents {
  DeviceEvents load;    // leaves its weights alive
  DeviceEvents decode;  // of one batch of a sample grid
  DeviceEvents encode;  // of the images of a pass, where they are encoded on the way
};
// On one of `world_size` ranks. `data`: of what is decoded.
AutoencoderEvents trace_autoencoder(const AutoencoderKlConfig& config, const TrainOptions& options,
                                    const DataShape& data, DryRunDevice device, int64_t world_size);

// Of `events`, alive at once and at the end.
int64_t peak_bytes(const DeviceEvents& events);
int64_t left_bytes(const DeviceEvents& events);

}  // namespace kiln
