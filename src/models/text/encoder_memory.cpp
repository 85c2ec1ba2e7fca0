#include "models/text/encoder_memory.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "core/aten.h"
#include "core/dry_run.h"
#include "core/meta_meter.h"

namespace kiln {
BatchMemory planned_batch(const TextEncoder& encoder, const std::vector<int64_t>& host_offsets,
                          at::Device device) {
  const at::NoGradGuard no_grad;
  const DryRunScope dry_run(device.is_cpu() ? DryRunDevice::kCpu : DryRunDevice::kCuda);
  MetaMeter meter;
  const MetaAllocationScope metering(meter);
  const TokenRows tokens{
      .ids = at::empty({host_offsets.back()}, at::TensorOptions(at::kMeta).dtype(at::kLong)),
      .host_offsets = host_offsets};
  BatchMemory memory;
  State state;
  for (const auto& segment : encoder.segments()) {
    state = segment->forward(state, {.tokens = tokens});
    memory.state_bytes = std::max(memory.state_bytes, meter.live);
  }
  memory.peak_bytes = meter.peak;
  return memory;
}

BatchMemory planned_batch(const TextEncoder& encoder, int64_t batch, int64_t length, at::Device device) {
  std::vector<int64_t> offsets;
  for (int64_t b = 0; b <= batch; ++b) offsets.push_back(b * length);
  return planned_batch(encoder, offsets, device);
}

}  // namespace kiln
