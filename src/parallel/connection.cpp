#include "parallel/connection.h"

#include <ATen/DeviceAccelerator.h>

#include <algorithm>
#include <exception>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#ifdef USE_C10D_NCCL
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

#include "core/aten.h"
#include "parallel/network.h"

namespace kiln {

// NCCL is to be told that all is done. After an error others may be gone: it would wait for them.
ProcessGroup::Connection::~Connection() {
  if (device == host || !device || is_broken || std::uncaught_exceptions() > 0) return;
  try {
    device->shutdown();
  } catch (const std::exception&) {  // nothing is asked of it any more
  }
}

std::chrono::milliseconds ProcessGroup::Connection::patience() const {
  return std::min<std::chrono::milliseconds>(options.timeout, std::chrono::minutes(5));
}

void ProcessGroup::Connection::fail_missing(const std::string& what, Clock::duration lasted,
                                            const std::string& why) {
  is_broken = true;
  const Ranks& ranks = heartbeat->ranks();
  throw MissingRanks(fmt::format("[ranks] rank {} of {}: {} failed after {:.1f} s: {}", ranks.rank,
                                 ranks.world_size, what, std::chrono::duration<double>(lasted).count(), why));
}

void ProcessGroup::Connection::open_backends(const std::string& prefix, const Ranks& ranks) {
  auto gloo = c10d::ProcessGroupGloo::Options::create(patience());
  gloo->devices.push_back(network_device(heartbeat->ranks()));
  const int rank = static_cast<int>(ranks.rank), world_size = static_cast<int>(ranks.world_size);
  host = c10::make_intrusive<c10d::ProcessGroupGloo>(
      c10::make_intrusive<c10d::PrefixStore>(prefix + "host", store), rank, world_size, gloo);
  host->setTimeout(options.timeout);
  device = host;
#ifdef USE_C10D_NCCL
  // NCCL ends the process without naming anybody: only where the waits of the host, which do, do not get to
  // it.
  constexpr std::chrono::minutes kAfterTheHost(1);
  if (!options.device.is_cuda()) return;
  at::accelerator::setDeviceIndex(options.device.index());  // NCCL is opened on it
  auto nccl = c10d::ProcessGroupNCCL::Options::create();
  nccl->timeout = options.timeout + kAfterTheHost;
  device = c10::make_intrusive<c10d::ProcessGroupNCCL>(
      c10::make_intrusive<c10d::PrefixStore>(prefix + "device", store), rank, world_size, nccl);
#endif
}

}  // namespace kiln
