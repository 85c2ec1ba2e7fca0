#include "parallel/process_group.h"

#include <ATen/DeviceAccelerator.h>
#include <dlfcn.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#ifdef USE_C10D_NCCL
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

#include <fmt/ranges.h>
#include <netdb.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <thread>

#include "core/aten.h"
#include "core/error.h"
#include "core/error_message.h"
#include "parallel/heartbeat.h"

// In the place of the C library's: c10d asks for the name of every address that it connects to, for messages
// that are not shown, which takes seconds where no name server answers. Numbers will do.
extern "C" int getnameinfo(const sockaddr* address, socklen_t size, char* host, socklen_t host_size,
                           char* service, socklen_t service_size, int flags) {
  static const auto next = reinterpret_cast<decltype(&getnameinfo)>(dlsym(RTLD_NEXT, "getnameinfo"));
  return next(address, size, host, host_size, service, service_size, flags | NI_NUMERICHOST);
}

namespace kiln {

namespace {

using Clock = std::chrono::steady_clock;

// The address of this machine that packets to `host` leave from; empty when `host` is unknown or is this
// machine by a loopback name. Nothing is sent.
std::string own_address_towards(const std::string& host) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_DGRAM;
  if (getaddrinfo(host.c_str(), "9", &hints, &found) != 0) return "";
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> addresses(found, &freeaddrinfo);
  const int probe = socket(found->ai_family, SOCK_DGRAM, 0);
  if (probe < 0) return "";
  sockaddr_storage own{};
  socklen_t size = sizeof own;
  auto* address = reinterpret_cast<sockaddr*>(&own);
  char name[NI_MAXHOST] = "";
  if (connect(probe, found->ai_addr, found->ai_addrlen) == 0 && getsockname(probe, address, &size) == 0)
    getnameinfo(address, size, name, sizeof name, nullptr, 0, NI_NUMERICHOST);
  close(probe);
  const std::string text = name;
  return text.starts_with("127.") || text == "::1" ? "" : text;
}

// Gloo's own default is the address of the host name, which on Debian is a loopback one.
std::shared_ptr<gloo::transport::Device> network_device(const Ranks& ranks) {
  if (const char* interface = std::getenv("GLOO_SOCKET_IFNAME"))
    return c10d::ProcessGroupGloo::createDeviceForInterface(interface);
  if (ranks.local_world_size == ranks.world_size)
    return c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1");
  const std::string address = own_address_towards(ranks.master_addr);
  return address.empty() ? c10d::ProcessGroupGloo::createDefaultDevice()
                         : c10d::ProcessGroupGloo::createDeviceForHostname(address);
}

// A peer that is gone is to be an error of whoever writes to it. The server of the rendezvous writes to
// sockets without saying so: the signal would end this process without a word.
void ignore_broken_pipes() {
  struct sigaction present {};
  if (sigaction(SIGPIPE, nullptr, &present) == 0 && present.sa_handler == SIG_DFL) signal(SIGPIPE, SIG_IGN);
}

std::string store_prefix(const std::string& attempt) { return "kiln/" + attempt; }

c10::intrusive_ptr<c10d::Store> open_store(const Ranks& ranks, std::chrono::milliseconds timeout) {
  ignore_broken_pipes();
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(ranks.master_port);
  options.isServer = ranks.rank == 0 && !ranks.launcher_hosts;
  options.waitWorkers = false;
  options.timeout = timeout;
  auto store = c10::make_intrusive<c10d::TCPStore>(ranks.master_addr, options);
  return c10::make_intrusive<c10d::PrefixStore>(store_prefix(ranks.attempt), store);
}

}  // namespace

struct Rendezvous::Server {
  c10::intrusive_ptr<c10d::TCPStore> store;
};

Rendezvous::Rendezvous() {
  ignore_broken_pipes();
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  server_ = std::make_unique<Server>(Server{c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options)});
}
Rendezvous::~Rendezvous() = default;
int64_t Rendezvous::port() const { return server_->store->getPort(); }
bool Rendezvous::has_reported_failure(int64_t rank) const {
  return c10d::PrefixStore(store_prefix(/*attempt=*/"0"), server_->store).check({failure_key_of(rank)});
}

namespace {

// The rendezvous as the heartbeats use it, over a connection of their own.
class StoreBoard : public NoticeBoard {
 public:
  explicit StoreBoard(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}
  void set(const std::string& key, const std::string& value) override { store_->set(key, value); }
  std::optional<std::string> find(const std::string& key) override {
    if (!store_->check({key})) return std::nullopt;
    const std::vector<uint8_t> value = store_->get(key);
    return std::string(value.begin(), value.end());
  }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace

struct ProcessGroup::Connection {
  c10::intrusive_ptr<c10d::Store> store;
  ProcessGroupOptions options;
  c10::intrusive_ptr<c10d::Backend> host, device;
  std::shared_ptr<Heartbeat> heartbeat;  // of all ranks, in a subgroup too
  int64_t num_subgroups = 0;             // made so far: each has keys of its own
  bool is_broken = false;                // a collective failed

  ~Connection();
  c10d::Backend& of(const at::Tensor& tensor) { return tensor.is_cpu() ? *host : *device; }
  // With ranks that are to come, or to connect.
  std::chrono::milliseconds patience() const {
    return std::min<std::chrono::milliseconds>(options.timeout, std::chrono::minutes(5));
  }
  void open_backends(const std::string& prefix, const Ranks& ranks);
  [[noreturn]] void fail_missing(const std::string& what, Clock::duration lasted, const std::string& why);
};

// NCCL is to be told that all is done. After an error others may be gone: it would wait for them.
ProcessGroup::Connection::~Connection() {
  if (device == host || !device || is_broken || std::uncaught_exceptions() > 0) return;
  try {
    device->shutdown();
  } catch (const std::exception&) {  // nothing is asked of it any more
  }
}

void ProcessGroup::Connection::fail_missing(const std::string& what, Clock::duration lasted,
                                            const std::string& why) {
  is_broken = true;
  const Ranks& ranks = heartbeat->ranks();
  throw MissingRanks(fmt::format("[ranks] rank {} of {}: {} failed after {:.1f} s: {}", ranks.rank,
                                 ranks.world_size, what, std::chrono::duration<double>(lasted).count(), why));
}

// `ranks`: this one among the members. Their keys in the store begin with `prefix`.
void ProcessGroup::Connection::open_backends(const std::string& prefix, const Ranks& ranks) {
  auto gloo = c10d::ProcessGroupGloo::Options::create(patience());
  gloo->devices.push_back(network_device(heartbeat->ranks()));
  const int rank = static_cast<int>(ranks.rank), world_size = static_cast<int>(ranks.world_size);
  host = c10::make_intrusive<c10d::ProcessGroupGloo>(
      c10::make_intrusive<c10d::PrefixStore>(prefix + "host", store), rank, world_size, gloo);
  host->setTimeout(options.timeout);
  device = host;
#ifdef USE_C10D_NCCL
  if (!options.device.is_cuda()) return;
  at::accelerator::setDeviceIndex(options.device.index());  // NCCL is opened on it
  auto nccl = c10d::ProcessGroupNCCL::Options::create();
  nccl->timeout = options.timeout;
  device = c10::make_intrusive<c10d::ProcessGroupNCCL>(
      c10::make_intrusive<c10d::PrefixStore>(prefix + "device", store), rank, world_size, nccl);
#endif
}

namespace {

std::string arrival_key_of(int64_t rank) { return fmt::format("here/{}", rank); }

// Waits for every rank to come to the rendezvous. Throws Error naming those that do not: the connections
// among ranks, which follow, would wait without a word. The rank that hosts the rendezvous is the last to
// give up, so that the others can still ask.
void meet(c10d::Store& store, const Ranks& ranks, std::chrono::milliseconds patience) {
  constexpr std::chrono::milliseconds kFirstPause(10), kLongestPause(500), kMoreOfTheHost(2000);
  const bool hosts = ranks.rank == 0 && !ranks.launcher_hosts;
  const Clock::time_point deadline =
      Clock::now() + patience + (hosts ? kMoreOfTheHost : std::chrono::milliseconds(0));
  std::vector<std::string> keys;
  for (int64_t rank = 0; rank < ranks.world_size; ++rank) keys.push_back(arrival_key_of(rank));
  store.set(keys[static_cast<size_t>(ranks.rank)], std::string("yes"));
  for (auto pause = kFirstPause; !store.check(keys); pause = std::min(2 * pause, kLongestPause)) {
    if (Clock::now() < deadline) {
      std::this_thread::sleep_for(pause);
      continue;
    }
    std::vector<int64_t> absent;
    for (int64_t rank = 0; rank < ranks.world_size; ++rank)
      if (!store.check({arrival_key_of(rank)})) absent.push_back(rank);
    if (absent.empty()) return;
    fail("ranks",
         "rank{} {} did not come within {:g} s: look what became of it, and start all ranks together",
         absent.size() == 1 ? "" : "s", fmt::join(absent, ", "),
         std::chrono::duration<double>(patience).count());
  }
}

}  // namespace

struct Collective::Work {
  ProcessGroup* group;
  c10::intrusive_ptr<c10d::Work> work;  // null in a dry run
  std::vector<at::Tensor> tensors;      // alive while others read and write them
  std::string name;
  int64_t number;
  Clock::time_point begin = Clock::now();

  // An error that has to name who is missing takes a few seconds: the ranks' heartbeats are compared.
  [[noreturn]] void fail_with(const std::exception& error) const {
    const auto lasted = Clock::now() - begin;
    group->connection_->fail_missing(
        name, lasted, message_of(error) + group->connection_->heartbeat->describe_missing(number));
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
  if (!work_ || !work_->work) return;
  try {
    work_->work->wait();
  } catch (const std::exception&) {  // whoever waits for its result is told
  }
}

void Collective::wait() {
  if (!work_) return;
  const std::unique_ptr<Work> work = std::move(work_);
  if (!work->work) {
    if (work->group->observer_) work->group->observer_->waited(work->number);
    return;
  }
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
  auto connection = std::make_unique<Connection>();
  connection->options = options;
  try {
    const auto patience = connection->patience();
    const auto store = open_store(ranks, patience);
    meet(*store, ranks, patience);
    connection->store = store;
    connection->heartbeat = std::make_shared<Heartbeat>(std::make_shared<StoreBoard>(store->clone()), ranks);
    connection->open_backends("", ranks);
    group->connection_ = std::move(connection);
  } catch (const std::exception& error) {
    fail("ranks", "rank {} of {} did not meet the others at {}:{}: {}{}", ranks.rank, ranks.world_size,
         ranks.master_addr, ranks.master_port, bare_message_of(error),
         connection && connection->heartbeat ? connection->heartbeat->describe_missing(0) : "");
  }
  return group;
}

// A collective of a dry run, seen by its observer.
Collective ProcessGroup::pretend(CollectiveObserver::Operation operation, const at::Tensor& whole) {
  ProcessGroup& all = root();
  if (!all.observer_) return {};
  const int64_t number = ++all.num_pretended_;
  all.observer_->started({.number = number,
                          .operation = operation,
                          .bytes = static_cast<int64_t>(whole.nbytes()),
                          .num_ranks = world_size(),
                          .on_one_machine = ranks_.local_world_size == world_size()});
  return Collective(std::make_unique<Collective::Work>(
      Collective::Work{.group = &all, .work = {}, .tensors = {}, .name = {}, .number = number}));
}

std::shared_ptr<ProcessGroup> ProcessGroup::subgroup(const std::string& name,
                                                     const std::vector<int64_t>& members) {
  Ranks ranks = ranks_;
  ranks.world_size = static_cast<int64_t>(members.size());
  ranks.rank = std::ranges::find(members, rank()) - members.begin();
  const int64_t first_here = ranks_.rank - ranks_.local_rank;
  const auto is_here = [&](int64_t member) {
    return member >= first_here && member < first_here + ranks_.local_world_size;
  };
  ranks.local_world_size = std::ranges::count_if(members, is_here);
  ranks.local_rank = std::count_if(members.begin(), members.begin() + ranks.rank, is_here);
  auto group = std::make_shared<ProcessGroup>(ranks);
  group->parent_ = this;
  if (!connection_ || members.size() == 1) return group;
  auto connection = std::make_unique<Connection>();
  connection->store = connection_->store;
  connection->options = connection_->options;
  connection->heartbeat = connection_->heartbeat;
  try {
    connection->open_backends(fmt::format("{}/{}/{}/", connection_->num_subgroups++, name, members.front()),
                              ranks);
  } catch (const std::exception& error) {
    fail("ranks", "rank {} of {} did not meet the ranks {} of {}: {}", rank(), world_size(), name,
         fmt::join(members, ", "), message_of(error));
  }
  group->connection_ = std::move(connection);
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
  root().volume_.all_reduced += tensor.numel();
  if (!connection_) return pretend(CollectiveObserver::Operation::kAllReduce, tensor);
  return start("all_reduce", what, {tensor});
}

Collective ProcessGroup::reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                        const std::string& what) {
  if (world_size() == 1) {
    if (!output.is_alias_of(input)) output.copy_(input);
    return {};
  }
  root().volume_.reduce_scattered += input.numel();
  if (!connection_) return pretend(CollectiveObserver::Operation::kReduceScatter, input);
  return start("reduce_scatter", what, {output, input});
}

Collective ProcessGroup::all_gather(const at::Tensor& output, const at::Tensor& input,
                                    const std::string& what) {
  if (world_size() == 1) {
    if (!output.is_alias_of(input)) output.copy_(input);
    return {};
  }
  root().volume_.all_gathered += output.numel();
  if (!connection_) return pretend(CollectiveObserver::Operation::kAllGather, output);
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

void ProcessGroup::wait_until(const std::function<bool()>& done, const std::string& what) {
  if (!connection_) throw std::logic_error("one rank waits for its device itself");
  const Clock::time_point begin = Clock::now();
  const std::string missing = connection_->heartbeat->wait_until(done);
  if (missing.empty()) return;
  const auto lasted = Clock::now() - begin;
  connection_->fail_missing("the wait for " + what, lasted, "it does not end" + missing);
}

void ProcessGroup::report_failure(const std::string& why) {
  if (connection_) connection_->heartbeat->report_failure(why);
}

void ProcessGroup::barrier(const std::string& what) { sum({0}, what); }

}  // namespace kiln
