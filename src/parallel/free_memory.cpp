#include "parallel/free_memory.h"

#include <ATen/DeviceAccelerator.h>

#include "core/error.h"
#include "core/memory_limits.h"
#include "core/text/byte_size.h"
#include "core/units.h"
#include "parallel/machine.h"

namespace kiln {

int64_t usable_bytes(at::Device device, int64_t num_processes) {
  const int64_t free = device.is_cpu()
                           ? host_memory().available_bytes / num_processes
                           : static_cast<int64_t>(at::accelerator::getMemoryInfo(device.index()).first);
  return free / 5 * 4;  // the rest stays for others
}

int64_t bytes_left_of(const char* option, const std::string& limit, at::Device device) {
  const int64_t bytes = byte_size(limit);
  if (bytes == 0) fail("memory", "--{} expects a size such as 3G, 2.5GiB or 800M, got '{}'", option, limit);
  const int64_t taken = device.is_cpu() ? resident_bytes() : device_bytes(device);
  if (taken >= bytes)
    fail("memory", "--{} {} is less than the {:.2f} GiB that this process takes already: give more", option,
         limit, gib(taken));
  return bytes - taken;
}

}  // namespace kiln
