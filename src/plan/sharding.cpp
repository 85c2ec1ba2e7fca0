#include "plan/sharding.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <unordered_map>

#include "core/error.h"
#include "plan/price.h"
#include "plan/rank_walk.h"

namespace kiln {

namespace {

constexpr double kCollectiveLatency = 15e-6;  // seconds, times log2 of the ranks
constexpr double kHostUpdateBytesPerS =
    40e9;  // of one rank's update on the host: memory-bound, half a socket

// The links among the ranks.
class Links {
 public:
  explicit Links(const MachineProfile& machine)
      // Processes of one CPU exchange through its memory: written and read on both sides.
      : within_(machine.peer_bytes_per_s > 0 ? machine.peer_bytes_per_s : machine.memory_bytes_per_s / 4),
        across_(machine.node_bytes_per_s > 0 ? std::min(within_, machine.node_bytes_per_s) : within_),
        gpus_per_node_(machine.gpus_per_node) {}

  // A reduce-scatter or all-gather is half of an all-reduce.
  double seconds(const CollectiveEvent& event) const {
    if (event.num_ranks <= 1 || event.bytes <= 0) return 0;
    const bool both = event.operation == CollectiveObserver::Operation::kAllReduce;
    const bool one_node = event.on_one_machine && event.num_ranks <= gpus_per_node_;
    const double ranks = static_cast<double>(event.num_ranks);
    const double half =
        (ranks - 1) / ranks * static_cast<double>(event.bytes) / (one_node ? within_ : across_) +
        kCollectiveLatency * std::log2(ranks);
    return (both ? 2 : 1) * half;
  }

 private:
  double within_, across_;
  int64_t gpus_per_node_;
};

// A rank's step: its operations one after another, collectives one after another on the link beside them.
class StepClock {
 public:
  StepClock(const StepTrace& trace, std::vector<double> op_seconds, const Links& links)
      : trace_(trace), collectives_(trace.collectives), op_seconds_(std::move(op_seconds)), links_(links) {
    while (num_earlier_ < collectives_.size() && collectives_[num_earlier_].begins &&
           collectives_[num_earlier_].before_op == 0)
      ++num_earlier_;
  }

  // A steady step's: the second one.
  void run() {
    step();
    // What the last step sent at its end is what the first step found under way.
    std::vector<double> arrivals;
    for (size_t i = collectives_.size(); i-- > 0 && arrivals.size() < num_earlier_;)
      if (collectives_[i].begins) arrivals.push_back(arrival_[collectives_[i].number + repeated_] - now_);
    std::ranges::reverse(arrivals);
    arrival_.clear();
    for (size_t i = 0; i < arrivals.size(); ++i) arrival_[collectives_[i].number] = arrivals[i];
    link_ = std::max(0.0, link_ - now_);
    now_ = waited_ = busy_ = 0;
    step();
  }
  double waited_seconds() const { return waited_; }
  double busy_seconds() const { return busy_; }

 private:
  void step() {
    size_t event = num_earlier_;
    repeated_ = 0;
    for (size_t op = 0; op < op_seconds_.size();) {
      // Equal micro-steps: their operations, and the collectives among them, again and again.
      size_t end = op + 1;
      const int64_t times = trace_.ops[op].times;
      while (times > 1 && end < op_seconds_.size() && trace_.ops[end].times == times) ++end;
      size_t next = event;
      for (int64_t i = 0; i < times; ++i) {
        next = run_ops(op, end, event);
        // The next one waits for what this one has begun.
        if (i + 1 < times) repeated_ += num_begun(event, next);
      }
      event = next;
      op = end;
    }
    while (event < collectives_.size()) meet(collectives_[event++]);
  }

  int64_t num_begun(size_t first, size_t last) const {
    return std::count_if(collectives_.begin() + static_cast<int64_t>(first),
                         collectives_.begin() + static_cast<int64_t>(last),
                         [](const CollectiveEvent& event) { return event.begins; });
  }

  size_t run_ops(size_t begin, size_t end, size_t event) {
    for (size_t op = begin; op < end; ++op) {
      while (event < collectives_.size() && collectives_[event].before_op <= op) meet(collectives_[event++]);
      now_ += op_seconds_[op];
    }
    return event;
  }

  void meet(const CollectiveEvent& event) {
    double& arrival = arrival_[event.number + repeated_];
    if (event.begins) {
      const double seconds = links_.seconds(event);
      busy_ += seconds;
      arrival = link_ = std::max(link_, now_) + seconds;
    } else if (arrival > now_) {
      waited_ += arrival - now_;
      now_ = arrival;
    }
  }

  const StepTrace& trace_;
  const std::vector<CollectiveEvent>& collectives_;
  std::vector<double> op_seconds_;
  const Links& links_;
  size_t num_earlier_ = 0;  // that began before the step
  // By number. Of what stands for several micro-steps each has numbers of its own: `repeated_` more.
  std::unordered_map<int64_t, double> arrival_;
  int64_t repeated_ = 0;
  double now_ = 0, link_ = 0, waited_ = 0, busy_ = 0;
};

// Ranks that state is divided among.
int64_t shards_of(const Sharding& sharding) {
  return sharding.ranks_per_node > 0 ? sharding.ranks_per_node : sharding.gpus;
}

// Gradients go to the host, the update runs there over what the rank keeps, weights come back.
double host_update(const StepTrace& trace, const MachineProfile& machine, const Sharding& sharding) {
  double elements = 0;
  for (const int64_t unit : trace.segment_weights)
    elements += static_cast<double>(
        shard_elements(unit, {.zero_stage = sharding.zero_stage, .world_size = shards_of(sharding)}));
  const double grad_bytes = static_cast<double>(c10::elementSize(trace.unit.grad_dtype)),
               weight_bytes = static_cast<double>(c10::elementSize(trace.unit.compute_dtype)),
               state_bytes = 4 * static_cast<double>(state_elements(1, trace.unit));
  const double moved = elements * (2 * state_bytes + grad_bytes + weight_bytes);  // read and written
  double seconds = moved / kHostUpdateBytesPerS;
  if (machine.host_link_bytes_per_s > 0 && machine.device == DryRunDevice::kCuda)
    seconds += elements * (grad_bytes + weight_bytes) / machine.host_link_bytes_per_s;
  if (sharding.offload_optimizer == "nvme" && machine.disk_bytes_per_s > 0) {
    const double sharing = static_cast<double>(std::min(sharding.gpus, machine.gpus_per_node));
    seconds += elements * 2 * state_bytes * sharing / machine.disk_bytes_per_s;
  }
  return seconds;
}

double num_micro_steps(const StepTrace& trace) {
  double micro_steps = 0;
  for (size_t i = 0; i < trace.ops.size(); ++i)
    if (trace.ops[i].phase == StepPhase::kInput && (i == 0 || trace.ops[i - 1].phase != StepPhase::kInput))
      micro_steps += static_cast<double>(trace.ops[i].times);
  return micro_steps;
}

// Inputs of segments go to the host and come back in every micro-step.
double activation_transfers(const StepTrace& trace, const MachineProfile& machine) {
  if (machine.host_link_bytes_per_s <= 0 || machine.device != DryRunDevice::kCuda) return 0;
  return 2 * num_micro_steps(trace) * static_cast<double>(trace.offloaded_activation_bytes) /
         machine.host_link_bytes_per_s;
}

// Weights that wait elsewhere come for every gather and go back after the update.
struct WeightTransfers {
  double link_s = 0, disk_s = 0;
};

WeightTransfers weight_transfers(const StepTrace& trace, const MachineProfile& machine,
                                 const Sharding& sharding) {
  WeightTransfers transfers;
  const Placement placement = placement_of(sharding.offload_params, trace.device == DryRunDevice::kCuda);
  if (sharding.zero_stage < 3 || placement == Placement::kDevice) return transfers;
  double bytes = 0;
  for (const int64_t unit : trace.segment_weights)
    bytes += static_cast<double>(shard_elements(unit, {.zero_stage = 3, .world_size = shards_of(sharding)})) *
             static_cast<double>(c10::elementSize(trace.unit.compute_dtype));
  bytes *= 2 * num_micro_steps(trace) + 1;  // forward and backward; the update
  if (machine.host_link_bytes_per_s > 0 && machine.device == DryRunDevice::kCuda)
    transfers.link_s = bytes / machine.host_link_bytes_per_s;
  if (placement == Placement::kNvme && machine.disk_bytes_per_s > 0)
    transfers.disk_s = bytes * static_cast<double>(std::min(sharding.gpus, machine.gpus_per_node)) /
                       machine.disk_bytes_per_s;
  return transfers;
}

// The part of the optimizer's elements that a rank updates.
double share(int64_t zero_stage, int64_t gpus) { return zero_stage > 0 ? 1 / static_cast<double>(gpus) : 1; }

// Seconds of each operation on a rank of `sharding`, whatever ranks the trace is of.
std::vector<double> op_seconds(const StepTrace& trace, const MachineProfile& machine,
                               const Sharding& sharding) {
  const int64_t shards = trace.ranks_per_node > 0 ? trace.ranks_per_node : trace.world_size;
  const double update = share(sharding.zero_stage, shards_of(sharding)) / share(trace.zero.stage, shards);
  const bool offloads = sharding.offload_optimizer != "none";
  std::vector<double> seconds;
  seconds.reserve(trace.ops.size());
  for (const OpRecord& op : trace.ops) {
    const bool updates = op.phase == StepPhase::kOptimizer || op.phase == StepPhase::kGradNorm;
    const bool on_host = offloads && (op.phase == StepPhase::kOptimizer || op.phase == StepPhase::kOffload);
    seconds.push_back(on_host ? 0 : price(op, machine) * (updates ? update : 1));
  }
  return seconds;
}

}  // namespace

Sharding sharding_of(const TrainOptions& options, int64_t gpus, const MachineProfile& machine) {
  const bool has_nodes = machine.node_bytes_per_s > 0 && gpus > machine.gpus_per_node;
  return {.gpus = gpus,
          .zero_stage = options.zero_stage,
          .offload_optimizer = options.offload_optimizer,
          .offload_params = options.offload_params,
          .ranks_per_node = options.shard_within_node && has_nodes ? machine.gpus_per_node : 0};
}

void validate(const Sharding& sharding) {
  if (sharding.gpus < 1) fail("plan", "--gpus expects a positive number, got {}", sharding.gpus);
  if (sharding.zero_stage < 0 || sharding.zero_stage > 3)
    fail("plan", "--zero-stage expects 0, 1, 2 or 3, got {}", sharding.zero_stage);
  const bool offloads_weights = sharding.zero_stage == 3 && sharding.offload_params != "none";
  if (sharding.zero_stage > 0 && sharding.gpus == 1 && !offloads_weights)
    fail("plan",
         "--zero-stage {} divides state among ranks, but --gpus is 1: give --gpus N, or --zero-stage 0",
         sharding.zero_stage);
  for (const auto& [option, place] : {std::pair{"offload-optimizer", sharding.offload_optimizer},
                                      {"offload-params", sharding.offload_params}})
    if (place != "none" && place != "cpu" && place != "nvme")
      fail("plan", "--{} expects none, cpu or nvme, got '{}'", option, place);
}

bool is_of(const StepTrace& trace, const Sharding& sharding) {
  const bool has_host = trace.device == DryRunDevice::kCuda;
  return trace.world_size == sharding.gpus && trace.zero.stage == sharding.zero_stage &&
         trace.ranks_per_node == sharding.ranks_per_node &&
         trace.unit.placement == placement_of(sharding.offload_optimizer, has_host) &&
         trace.unit.weight_placement == placement_of(sharding.offload_params, has_host);
}

StepTime time_step(const StepTrace& trace, const MachineProfile& machine, const Sharding& sharding) {
  const bool has_collectives = trace.world_size == sharding.gpus && trace.zero.stage == sharding.zero_stage &&
                               trace.ranks_per_node == sharding.ranks_per_node;
  if (sharding.gpus > 1 && !has_collectives)
    return time_step(trace_of_rank(trace, sharding), machine, sharding);
  StepTime time;
  std::vector<double> seconds = op_seconds(trace, machine, sharding);
  for (size_t i = 0; i < seconds.size(); ++i)
    time.by_phase[static_cast<size_t>(trace.ops[i].phase)] +=
        seconds[i] * static_cast<double>(trace.ops[i].times);
  if (sharding.offload_optimizer != "none") {
    time.host_s = host_update(trace, machine, sharding);
    time.by_phase[static_cast<size_t>(StepPhase::kOptimizer)] = time.host_s;
  }
  if (sharding.gpus > 1) {
    const Links links(machine);
    StepClock clock(trace, std::move(seconds), links);
    clock.run();
    time.by_phase[static_cast<size_t>(StepPhase::kCommunication)] += clock.waited_seconds();
    time.communication_s = clock.busy_seconds();
  }
  const auto of = [&](StepPhase phase) -> double& { return time.by_phase[static_cast<size_t>(phase)]; };
  const WeightTransfers transfers = weight_transfers(trace, machine, sharding);
  const double walk_s = of(StepPhase::kForward) + of(StepPhase::kRecompute) + of(StepPhase::kBackward);
  // Copies to the device are queued among the compute; the disk reads beside it.
  of(StepPhase::kOffload) += transfers.link_s + std::max(0.0, transfers.disk_s - transfers.link_s - walk_s);
  // Activations are copied beside the walk.
  of(StepPhase::kOffload) += std::max(0.0, activation_transfers(trace, machine) - walk_s);
  time.seconds = std::accumulate(time.by_phase.begin(), time.by_phase.end(), 0.0);
  return time;
}

}  // namespace kiln
