#include "parallel/ranks/connection.h"

#include <ATen/DeviceAccelerator.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#ifdef USE_C10D_NCCL
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

#include "core/aten.h"
#include "core/error.h"

namespace kiln {

// Shuts NCCL down, but not after an error: other ranks may be gone, and it would wait for them. After an
// error Gloo would wait for its threads, one of which may wait for a rank that is gone; they end with the
// process.
GroupConnection::~GroupConnection() {
  if (is_broken) static_cast<void>(host.release());
  if (device == host || !device || is_broken || std::uncaught_exceptions() > 0) return;
  try {
    device->shutdown();
  } catch (const std::exception&) {  // it is not used any more
  }
}

std::chrono::milliseconds GroupConnection::patience() const {
  return std::min<std::chrono::milliseconds>(options.timeout, std::chrono::minutes(5));
}

void GroupConnection::fail_missing(const std::string& what, Clock::duration lasted, const std::string& why) {
  is_broken = true;
  const Ranks& ranks = heartbeat->ranks();
  throw MissingRanks(fmt::format("rank {} of {}: {} failed after {:.1f} s: {}", ranks.rank, ranks.world_size,
                                 what, std::chrono::duration<double>(lasted).count(), why));
}

void GroupConnection::open_backends(const std::string& prefix, const Ranks& ranks) {
  host = open_gloo(c10::make_intrusive<c10d::PrefixStore>(prefix + "host", store), ranks, heartbeat->ranks(),
                   patience());
  host->setTimeout(options.timeout);
  device = host;
#ifdef USE_C10D_NCCL
  // NCCL's timeout ends the process without naming anybody. It comes after the host's waits, which do name
  // the missing ranks.
  constexpr std::chrono::minutes kAfterTheHost(1);
  if (!options.device.is_cuda()) return;
  at::accelerator::setDeviceIndex(options.device.index());  // NCCL is opened on it
  auto nccl = c10d::ProcessGroupNCCL::Options::create();
  nccl->timeout = options.timeout + kAfterTheHost;
  device = c10::make_intrusive<c10d::ProcessGroupNCCL>(
      c10::make_intrusive<c10d::PrefixStore>(prefix + "device", store), static_cast<int>(ranks.rank),
      static_cast<int>(ranks.world_size), nccl);
  make_first_collective();
#endif
}

void GroupConnection::make_first_collective() {
  // Shared with a thread that outlives this call if NCCL does not return.
  struct Attempt {
    std::atomic<bool> is_over = false;
    std::string error;  // read once it is over
  };
  const auto attempt = std::make_shared<Attempt>();
  std::thread([attempt, backend = device, on = options.device] {
    try {
      if (on.is_cuda()) at::accelerator::setDeviceIndex(on.index());
      std::vector<at::Tensor> one{at::ones({1}, at::TensorOptions(on))};
      backend->allreduce(one)->wait();
      const double sum = one.front().item<double>();
      if (sum != backend->getSize())
        attempt->error = fmt::format("{} ranks add up to {}", backend->getSize(), sum);
    } catch (const std::exception& error) {
      attempt->error = message_of(error);
    }
    attempt->is_over = true;
  }).detach();
  const auto missing = heartbeat->wait_until([&] { return attempt->is_over.load(); }, patience());
  if (missing) fail("ranks", "the first collective does not end{}", *missing);
  if (!attempt->error.empty()) fail("ranks", "the first collective failed: {}", attempt->error);
}

}  // namespace kiln
