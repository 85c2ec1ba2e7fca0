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
  Links(const MachineProfile& machine, int64_t gpus) : gpus_(gpus) {
    // Processes of one CPU exchange through its memory: written and read on both sides.
    const double within =
        machine.peer_bytes_per_s > 0 ? machine.peer_bytes_per_s : machine.memory_bytes_per_s / 4;
    const bool one_node = gpus <= machine.gpus_per_node || machine.node_bytes_per_s <= 0;
    bytes_per_s_ = one_node ? within : std::min(within, machine.node_bytes_per_s);
  }

  // reduce_scatter or all_gather of `bytes` in all.
  double half(double bytes) const {
    if (gpus_ <= 1 || bytes <= 0) return 0;
    const double ranks = static_cast<double>(gpus_);
    return (ranks - 1) / ranks * bytes / bytes_per_s_ + kCollectiveLatency * std::log2(ranks);
  }
  double seconds(const CollectiveEvent& event) const {
    const bool both = event.operation == CollectiveObserver::Operation::kAllReduce;
    return (both ? 2 : 1) * half(static_cast<double>(event.bytes));
  }

 private:
  int64_t gpus_;
  double bytes_per_s_ = 1;
};

// A rank's step: its operations one after another, collectives one after another on the link beside them.
class StepClock {
 public:
  StepClock(const StepTrace& trace, const std::vector<CollectiveEvent>& collectives,
            std::vector<double> op_seconds, const Links& links)
      : trace_(trace), collectives_(collectives), op_seconds_(std::move(op_seconds)), links_(links) {
    while (num_earlier_ < collectives.size() && collectives[num_earlier_].begins &&
           collectives[num_earlier_].before_op == 0)
      ++num_earlier_;
  }

  // A steady step's: the second one.
  void run() {
    step();
    // What the last step sent at its end is what the first step found under way.
    std::vector<double> arrivals;
    for (size_t i = collectives_.size(); i-- > 0 && arrivals.size() < num_earlier_;)
      if (collectives_[i].begins) arrivals.push_back(arrival_[collectives_[i].number] - now_);
    std::ranges::reverse(arrivals);
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
    for (size_t op = 0; op < op_seconds_.size();) {
      // Equal micro-steps: their operations, and the collectives among them, again and again.
      size_t end = op + 1;
      const int64_t times = trace_.ops[op].times;
      while (times > 1 && end < op_seconds_.size() && trace_.ops[end].times == times) ++end;
      size_t next = event;
      for (int64_t i = 0; i < times; ++i) next = run_ops(op, end, event);
      event = next;
      op = end;
    }
    while (event < collectives_.size()) meet(collectives_[event++]);
  }

  size_t run_ops(size_t begin, size_t end, size_t event) {
    for (size_t op = begin; op < end; ++op) {
      while (event < collectives_.size() && collectives_[event].before_op <= op) meet(collectives_[event++]);
      now_ += op_seconds_[op];
    }
    return event;
  }

  void meet(const CollectiveEvent& event) {
    double& arrival = arrival_[event.number];
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
  std::unordered_map<int64_t, double> arrival_;
  double now_ = 0, link_ = 0, waited_ = 0, busy_ = 0;
};

// Gradients go to the host, the update runs there over what the rank keeps, weights come back.
double host_update(const StepTrace& trace, const MachineProfile& machine, const Sharding& sharding) {
  double elements = 0;
  for (const int64_t unit : trace.segment_weights)
    elements += static_cast<double>(
        shard_elements(unit, {.zero_stage = sharding.zero_stage, .world_size = sharding.gpus}));
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

// The part of the optimizer's elements that a rank updates.
double share(int64_t zero_stage, int64_t gpus) { return zero_stage > 0 ? 1 / static_cast<double>(gpus) : 1; }

// Seconds of each operation on a rank of `sharding`, whatever ranks the trace is of.
std::vector<double> op_seconds(const StepTrace& trace, const MachineProfile& machine,
                               const Sharding& sharding) {
  const double update = share(sharding.zero_stage, sharding.gpus) / share(trace.zero.stage, trace.world_size);
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

void validate(const Sharding& sharding) {
  if (sharding.gpus < 1) fail("plan", "--gpus expects a positive number, got {}", sharding.gpus);
  if (sharding.zero_stage < 0 || sharding.zero_stage > 3)
    fail("plan", "--zero-stage expects 0, 1, 2 or 3, got {}", sharding.zero_stage);
  if (sharding.zero_stage > 0 && sharding.gpus == 1)
    fail("plan",
         "--zero-stage {} divides state among ranks, but --gpus is 1: give --gpus N, or --zero-stage 0",
         sharding.zero_stage);
  const std::string& offload = sharding.offload_optimizer;
  if (offload != "none" && offload != "cpu" && offload != "nvme")
    fail("plan", "--offload-optimizer expects none, cpu or nvme, got '{}'", offload);
}

int64_t RankState::device_bytes() const {
  int64_t total = 0;
  for (const auto& [kind, bytes] : device) total += bytes;
  return total;
}

RankState shard_state(const StepTrace& trace, const Sharding& sharding) {
  RankState state;
  if (trace.world_size != sharding.gpus || trace.zero.stage != sharding.zero_stage ||
      trace.unit.placement != placement_of(sharding, trace.device)) {
    state = walk_rank(trace, sharding).state;
  } else {
    state.device = trace.memory.persistent;
    state.pinned_bytes = trace.offloaded.host;
    state.nvme_bytes = trace.offloaded.disk;
  }
  state.pinned_bytes += trace.offloaded_activation_bytes;
  return state;
}

StepTime time_step(const StepTrace& trace, const MachineProfile& machine, const Sharding& sharding) {
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
    const bool has_them = trace.world_size > 1 && trace.zero.stage == sharding.zero_stage;
    const std::vector<CollectiveEvent> walked =
        has_them ? std::vector<CollectiveEvent>{} : walk_rank(trace, sharding).collectives;
    const Links links(machine, sharding.gpus);
    StepClock clock(trace, has_them ? trace.collectives : walked, std::move(seconds), links);
    clock.run();
    time.by_phase[static_cast<size_t>(StepPhase::kCommunication)] += clock.waited_seconds();
    time.communication_s = clock.busy_seconds();
  }
  time.seconds = std::accumulate(time.by_phase.begin(), time.by_phase.end(), 0.0);
  return time;
}

}  // namespace kiln
