#include "parallel/ranks/process_group.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

#include "core/aten.h"
#include "core/error.h"
#include "parallel/ranks/collective_work.h"
#include "parallel/ranks/connection.h"
#include "parallel/ranks/rendezvous_store.h"

namespace kiln {

namespace {

const char* name_of(CollectiveObserver::Operation operation) {
  switch (operation) {
    case CollectiveObserver::Operation::kAllReduce:
      return "all_reduce";
    case CollectiveObserver::Operation::kReduceScatter:
      return "reduce_scatter";
    case CollectiveObserver::Operation::kAllGather:
      return "all_gather";
  }
  return "";
}

}  // namespace

ProcessGroup::ProcessGroup(const Ranks& ranks) : ranks_(ranks) {}
ProcessGroup::~ProcessGroup() = default;

std::shared_ptr<ProcessGroup> ProcessGroup::connect(const Ranks& ranks, const ProcessGroupOptions& options) {
  auto group = std::make_shared<ProcessGroup>(ranks);
  if (ranks.world_size == 1 && !options.connects_alone) return group;
  // The switch adds in any order. NCCL reads this when it opens.
  if (options.deterministic) ::setenv("NCCL_ALGO", "^NVLS,NVLSTree", /*overwrite=*/0);
  // c10d's record of the last 2,000 collectives is not kept: the heartbeat has Kiln's own. Small blocks that
  // live for hundreds of steps would come to lie anywhere, and c10d does not make it for several ranks in one
  // process.
  ::setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/1);
  auto connection = std::make_unique<GroupConnection>();
  connection->options = options;
  try {
    const auto patience = connection->patience();
    const auto store = open_store(ranks, patience);
    auto board = meet(*store, ranks, patience);
    if (ranks.rank == 0 && ranks.secret.empty() && !is_on_loopback(ranks))
      fmt::print(stderr,
                 "warning: these ranks have no secret, so whoever reaches {}:{} can end them with a "
                 "message of their own: set KILN_JOB_SECRET or KILN_JOB_SECRET_FILE\n",
                 ranks.master_addr, ranks.master_port);
    connection->store = store;
    connection->heartbeat = std::make_shared<Heartbeat>(std::move(board), ranks);
    connection->open_backends("", ranks);
    group->connection_ = std::move(connection);
  } catch (const std::exception& error) {
    fail("ranks", "rank {} of {} did not meet the others at {}:{}: {}{}", ranks.rank, ranks.world_size,
         ranks.master_addr, ranks.master_port, message_of(error),
         connection && connection->heartbeat ? connection->heartbeat->describe_missing(0) : "");
  }
  return group;
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
  if (!connection_ || (members.size() == 1 && !connection_->options.connects_alone)) return group;
  auto connection = std::make_unique<GroupConnection>();
  connection->store = connection_->store;
  connection->options = connection_->options;
  connection->heartbeat = connection_->heartbeat;
  try {
    connection->open_backends(fmt::format("{}/{}/{}/", connection_->num_subgroups++, name, members.front()),
                              ranks);
  } catch (const std::exception& error) {
    fail("ranks", "rank {} of {} did not meet the other {} ranks of its group \"{}\": {}", rank(),
         world_size(), members.size() - 1, name, message_of(error));
  }
  group->connection_ = std::move(connection);
  return group;
}

// Begins a collective on tensors, also in a dry run.
Collective ProcessGroup::begin(Operation operation, const std::string& what, const at::Tensor& whole,
                               std::vector<at::Tensor> tensors) {
  ProcessGroup& all = root();
  if (!connection_ && !all.observer_) return {};
  const int64_t number = connection_ ? connection_->heartbeat->next_collective() : ++all.num_pretended_;
  if (all.observer_)
    all.observer_->started({.number = number,
                            .operation = operation,
                            .bytes = static_cast<int64_t>(whole.nbytes()),
                            .num_ranks = world_size(),
                            .on_one_machine = ranks_.local_world_size == world_size(),
                            .what = what});
  if (connection_) return start(operation, what, std::move(tensors), number, /*is_observed=*/true);
  return Collective(std::make_unique<CollectiveWork>(CollectiveWork{.connection = nullptr,
                                                                    .observer = &all.observer_,
                                                                    .work = {},
                                                                    .tensors = {},
                                                                    .name = {},
                                                                    .number = number}));
}

// tensors[0] is the result and the last tensor the input; they are the same one if the operation is in place.
Collective ProcessGroup::start(Operation operation, const std::string& what, std::vector<at::Tensor> tensors,
                               int64_t number, bool is_observed) {
  auto work = std::make_unique<CollectiveWork>(
      CollectiveWork{.connection = connection_.get(),
                     .observer = is_observed ? &root().observer_ : nullptr,
                     .work = {},
                     .tensors = std::move(tensors),
                     .name = fmt::format("{} of {}", name_of(operation), what),
                     .number = number});
  at::Tensor& result = work->tensors.front();
  at::Tensor& input = work->tensors.back();
  c10d::Backend& backend = connection_->of(result);
  try {
    switch (operation) {
      case Operation::kAllReduce:
        work->work = backend.allreduce(work->tensors);
        break;
      case Operation::kReduceScatter:
        if (input.is_cpu()) {
          // As c10d does with Gloo, but without its copy of the input. Its own work has no wait with a
          // timeout.
          std::vector<at::Tensor> whole{input};
          work->work = backend.allreduce(whole);
          work->sums = input.chunk(world_size())[static_cast<size_t>(rank())];
        } else {
          work->work = backend._reduce_scatter_base(result, input);
        }
        break;
      case Operation::kAllGather:
        work->work = backend._allgather_base(result, input);
        break;
    }
  } catch (const std::exception& error) {
    work->fail_with(error);
  }
  return Collective(std::move(work));
}

// Exchanges values of the host and waits.
void ProcessGroup::exchange(Operation operation, const std::string& what, std::vector<at::Tensor> tensors) {
  start(operation, what, std::move(tensors), connection_->heartbeat->next_collective(), /*is_observed=*/false)
      .wait();
}

Collective ProcessGroup::all_reduce(const at::Tensor& tensor, const std::string& what) {
  if (is_alone()) return {};
  root().volume_.all_reduced += tensor.numel();
  return begin(Operation::kAllReduce, what, tensor, {tensor});
}

Collective ProcessGroup::reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                        const std::string& what) {
  if (is_alone()) {
    if (!output.is_alias_of(input)) output.copy_(input);
    return {};
  }
  root().volume_.reduce_scattered += input.numel();
  return begin(Operation::kReduceScatter, what, input, {output, input});
}

Collective ProcessGroup::all_gather(const at::Tensor& output, const at::Tensor& input,
                                    const std::string& what) {
  if (is_alone()) {
    if (!output.is_alias_of(input)) output.copy_(input);
    return {};
  }
  root().volume_.all_gathered += output.numel();
  return begin(Operation::kAllGather, what, output, {output, input});
}

std::vector<double> ProcessGroup::sum(std::vector<double> values, const std::string& what) {
  if (!connection_) return values;
  const at::Tensor tensor = at::tensor(values, at::kDouble);  // its own memory: a failed exchange may keep it
  exchange(Operation::kAllReduce, what, {tensor});
  std::copy_n(tensor.const_data_ptr<double>(), values.size(), values.begin());
  return values;
}

Collective ProcessGroup::sum_tensor(const at::Tensor& values, const std::string& what) {
  if (!connection_) return {};
  return start(Operation::kAllReduce, what, {values}, connection_->heartbeat->next_collective(),
               /*is_observed=*/false);
}

std::vector<std::string> ProcessGroup::gather(const std::string& text, const std::string& what) {
  if (!connection_) return {text};
  std::vector<double> sizes(static_cast<size_t>(world_size()));
  sizes[static_cast<size_t>(rank())] = static_cast<double>(text.size());
  sizes = sum(std::move(sizes), what);
  const auto longest = static_cast<int64_t>(*std::ranges::max_element(sizes));
  const at::Tensor mine = at::zeros({longest}, at::kByte),
                   all = at::empty({world_size() * longest}, at::kByte);
  std::ranges::copy(text, reinterpret_cast<char*>(mine.data_ptr<uint8_t>()));
  if (longest > 0) exchange(Operation::kAllGather, what, {all, mine});
  std::vector<std::string> texts;
  texts.reserve(static_cast<size_t>(world_size()));
  for (int64_t r = 0; r < world_size(); ++r)
    texts.emplace_back(reinterpret_cast<const char*>(all.const_data_ptr<uint8_t>()) + r * longest,
                       static_cast<size_t>(sizes[static_cast<size_t>(r)]));
  return texts;
}

void ProcessGroup::wait_until(const std::function<bool()>& done, const std::string& what) {
  if (!connection_) throw std::logic_error("one rank waits for its device itself");
  const auto begin = GroupConnection::Clock::now();
  const std::optional<std::string> missing =
      connection_->heartbeat->wait_until(done, connection_->options.timeout);
  if (!missing) return;
  const auto lasted = GroupConnection::Clock::now() - begin;
  connection_->fail_missing("the wait for " + what, lasted, "it does not end" + *missing);
}

void ProcessGroup::report_failure(const std::string& why) {
  if (connection_) connection_->heartbeat->report_failure(why);
}

void ProcessGroup::barrier(const std::string& what) { sum({0}, what); }

}  // namespace kiln
