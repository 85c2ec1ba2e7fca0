#include "parallel/process_group.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#ifdef USE_C10D_NCCL
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>

#include "core/error.h"
#include "parallel/heartbeat.h"

namespace kiln {

namespace {

using Clock = std::chrono::steady_clock;

// One line, without the place in the source that libraries put first: "[/path/pair.cc:538] Connection closed
// ..."
std::string first_line(std::string text) {
  text = text.substr(0, text.find('\n'));
  if (text.starts_with("[")) text = text.substr(std::min(text.size(), text.find("] ") + 2));
  return text;
}

std::string message_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return first_line(torch_error ? torch_error->what_without_backtrace() : error.what());
}

std::shared_ptr<gloo::transport::Device> network_device(const Ranks& ranks) {
  if (const char* interface = std::getenv("GLOO_SOCKET_IFNAME"))
    return c10d::ProcessGroupGloo::createDeviceForInterface(interface);
  if (ranks.local_world_size == ranks.world_size)
    return c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1");
  return c10d::ProcessGroupGloo::createDefaultDevice();
}

c10::intrusive_ptr<c10d::Store> open_store(const Ranks& ranks, std::chrono::milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(ranks.master_port);
  options.isServer = ranks.rank == 0 && !ranks.launcher_hosts;
  options.waitWorkers = false;
  options.timeout = timeout;
  auto store = c10::make_intrusive<c10d::TCPStore>(ranks.master_addr, options);
  return c10::make_intrusive<c10d::PrefixStore>("kiln/" + ranks.attempt, store);
}

}  // namespace

struct Rendezvous::Server {
  c10::intrusive_ptr<c10d::TCPStore> store;
};

Rendezvous::Rendezvous() {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  server_ = std::make_unique<Server>(Server{c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options)});
}
Rendezvous::~Rendezvous() = default;
int64_t Rendezvous::port() const { return server_->store->getPort(); }

struct ProcessGroup::Connection {
  c10::intrusive_ptr<c10d::Store> store;
  c10::intrusive_ptr<c10d::Backend> host, device;
  std::unique_ptr<Heartbeat> heartbeat;

  c10d::Backend& of(const at::Tensor& tensor) { return tensor.is_cpu() ? *host : *device; }
};

struct Collective::Work {
  ProcessGroup* group;
  c10::intrusive_ptr<c10d::Work> work;
  std::vector<at::Tensor> tensors;  // alive while others read and write them
  std::string name;
  int64_t number;
  Clock::time_point begin = Clock::now();

  // An error that has to name who is missing takes a few seconds: the ranks' heartbeats are compared.
  [[noreturn]] void fail_with(const std::exception& error) const {
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    const Ranks& ranks = group->ranks();
    fail("ranks", "rank {} of {}: {} failed after {:.1f} s: {}{}", ranks.rank, ranks.world_size, name,
         seconds, message_of(error), group->connection_->heartbeat->describe_missing(number));
  }
};

Collective::Collective() = default;
Collective::Collective(std::unique_ptr<Work> work) : work_(std::move(work)) {}
Collective::Collective(Collective&&) noexcept = default;

Collective& Collective::operator=(Collective&& other) noexcept {
  if (this != &other) {
    Collective finished(std::move(*this));
    work_ = std::move(other.work_);
  }
  return *this;
}

Collective::~Collective() {
  if (!work_) return;
  try {
    work_->work->wait();
  } catch (const std::exception&) {  // whoever waits for its result is told
  }
}

void Collective::wait() {
  if (!work_) return;
  const std::unique_ptr<Work> work = std::move(work_);
  try {
    work->work->wait();
  } catch (const std::exception& error) {
    work->fail_with(error);
  }
}

ProcessGroup::ProcessGroup(const Ranks& ranks) : ranks_(ranks) {}
ProcessGroup::~ProcessGroup() = default;

std::shared_ptr<ProcessGroup> ProcessGroup::connect(const Ranks& ranks, const ProcessGroupOptions& options) {
  auto group = std::make_shared<ProcessGroup>(ranks);
  if (ranks.world_size == 1) return group;
  constexpr std::chrono::milliseconds kMostPatience = std::chrono::minutes(5);
  try {
    const auto store = open_store(ranks, std::min(options.timeout, kMostPatience));
    auto connection = std::make_unique<Connection>();
    connection->store = store;
    auto gloo = c10d::ProcessGroupGloo::Options::create(options.timeout);
    gloo->devices.push_back(network_device(ranks));
    const int rank = static_cast<int>(ranks.rank), world_size = static_cast<int>(ranks.world_size);
    connection->host = c10::make_intrusive<c10d::ProcessGroupGloo>(
        c10::make_intrusive<c10d::PrefixStore>("host", store), rank, world_size, gloo);
    connection->device = connection->host;
#ifdef USE_C10D_NCCL
    if (options.device.is_cuda()) {
      auto nccl = c10d::ProcessGroupNCCL::Options::create();
      nccl->timeout = options.timeout;
      connection->device = c10::make_intrusive<c10d::ProcessGroupNCCL>(
          c10::make_intrusive<c10d::PrefixStore>("device", store), rank, world_size, nccl);
    }
#endif
    connection->heartbeat = std::make_unique<Heartbeat>(store->clone(), ranks);
    group->connection_ = std::move(connection);
  } catch (const std::exception& error) {
    fail("ranks", "rank {} of {} did not meet the others at {}:{}: {}", ranks.rank, ranks.world_size,
         ranks.master_addr, ranks.master_port, message_of(error));
  }
  return group;
}

// Begins a collective: tensors[0] is its result, tensors[1] its input where it is not in place.
Collective ProcessGroup::start(const char* operation, const std::string& what,
                               std::vector<at::Tensor> tensors) {
  auto work = std::make_unique<Collective::Work>(
      Collective::Work{.group = this,
                       .work = {},
                       .tensors = std::move(tensors),
                       .name = fmt::format("{} of {}", operation, what),
                       .number = connection_->heartbeat->next_collective()});
  at::Tensor& result = work->tensors.front();
  at::Tensor& input = work->tensors.back();
  c10d::Backend& backend = connection_->of(result);
  try {
    if (std::strcmp(operation, "all_reduce") == 0) {
      work->work = backend.allreduce(work->tensors);
    } else if (std::strcmp(operation, "reduce_scatter") == 0) {
      work->work = backend._reduce_scatter_base(result, input);
    } else {
      work->work = backend._allgather_base(result, input);
    }
  } catch (const std::exception& error) {
    work->fail_with(error);
  }
  return Collective(std::move(work));
}

Collective ProcessGroup::all_reduce(const at::Tensor& tensor, const std::string& what) {
  if (world_size() == 1) return {};
  volume_.all_reduced += tensor.numel();
  if (!connection_) return {};
  return start("all_reduce", what, {tensor});
}

Collective ProcessGroup::reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                        const std::string& what) {
  if (world_size() == 1) {
    if (!output.is_alias_of(input)) output.copy_(input);
    return {};
  }
  volume_.reduce_scattered += input.numel();
  if (!connection_) return {};
  return start("reduce_scatter", what, {output, input});
}

Collective ProcessGroup::all_gather(const at::Tensor& output, const at::Tensor& input,
                                    const std::string& what) {
  if (world_size() == 1) {
    if (!output.is_alias_of(input)) output.copy_(input);
    return {};
  }
  volume_.all_gathered += output.numel();
  if (!connection_) return {};
  return start("all_gather", what, {output, input});
}

std::vector<double> ProcessGroup::sum(std::vector<double> values, const std::string& what) {
  if (!connection_) return values;
  const at::Tensor tensor = at::from_blob(values.data(), {static_cast<int64_t>(values.size())}, at::kDouble);
  start("all_reduce", what, {tensor}).wait();
  return values;
}

std::vector<std::string> ProcessGroup::gather(const std::string& text, const std::string& what) {
  if (!connection_) return {text};
  std::vector<double> sizes(static_cast<size_t>(world_size()));
  sizes[static_cast<size_t>(rank())] = static_cast<double>(text.size());
  sizes = sum(std::move(sizes), what);
  const auto longest = static_cast<int64_t>(*std::ranges::max_element(sizes));
  const at::Tensor mine = at::zeros({longest}, at::kByte),
                   all = at::empty({world_size() * longest}, at::kByte);
  std::memcpy(mine.data_ptr(), text.data(), text.size());
  if (longest > 0) start("all_gather", what, {all, mine}).wait();
  std::vector<std::string> texts;
  for (int64_t r = 0; r < world_size(); ++r)
    texts.emplace_back(reinterpret_cast<const char*>(all.const_data_ptr<uint8_t>()) + r * longest,
                       static_cast<size_t>(sizes[static_cast<size_t>(r)]));
  return texts;
}

void ProcessGroup::barrier(const std::string& what) { sum({0}, what); }

}  // namespace kiln
