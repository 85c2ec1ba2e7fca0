#include "plan/sharding.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/error.h"
#include "plan/price.h"

namespace kiln {

namespace {

constexpr int64_t kShardAlignment = 32;       // elements, as flat units are
constexpr double kCollectiveLatency = 15e-6;  // seconds, times log2 of the ranks
constexpr double kHostUpdateBytesPerS =
    40e9;                                 // of one rank's update on the host: memory-bound, half a socket
constexpr int64_t kGatheredSegments = 2;  // at stage 3: the present one and the one ahead

int64_t sum(const std::vector<int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

// Sum of the `count` largest.
int64_t largest(std::vector<int64_t> values, int64_t count) {
  std::ranges::sort(values, std::greater<>());
  values.resize(std::min(values.size(), static_cast<size_t>(count)));
  return sum(values);
}

int64_t bytes_per_element(const StepTrace& trace, MemoryKind kind) {
  const auto found = trace.memory.persistent.find(kind);
  const int64_t elements = sum(trace.segment_weights);
  return found == trace.memory.persistent.end() || elements == 0 ? 0 : found->second / elements;
}

// Weights are computed with in the master itself where the compute dtype is f32.
bool computes_in_master(const StepTrace& trace) {
  return bytes_per_element(trace, MemoryKind::kWeights) == 0;
}

int64_t compute_bytes(const StepTrace& trace) {
  return computes_in_master(trace) ? 4 : bytes_per_element(trace, MemoryKind::kWeights);
}

bool is_optimizer_state(MemoryKind kind) {
  return kind == MemoryKind::kMaster || kind == MemoryKind::kMoments || kind == MemoryKind::kEma;
}

// From which stage on a rank keeps only its share.
int64_t sharded_from(MemoryKind kind) {
  if (is_optimizer_state(kind)) return 1;
  if (kind == MemoryKind::kGradients) return 2;
  if (kind == MemoryKind::kWeights) return 3;
  return 4;  // untrained tables: never
}

// Seconds of every segment, averaged over the micro-steps.
struct Walk {
  std::vector<double> forward, backward;  // backward: recomputation included
  double optimizer = 0, grad_norm = 0, other = 0;
  int64_t num_micro_steps = 1;
};

Walk walk_of(const StepTrace& trace, const MachineProfile& machine,
             std::array<double, kNumStepPhases>& by_phase) {
  Walk walk;
  walk.forward.resize(trace.segments.size());
  walk.backward.resize(trace.segments.size());
  int64_t losses = 0;
  StepPhase before = StepPhase::kInput;
  for (const OpRecord& op : trace.ops) {
    const double seconds = price(op, machine);
    by_phase[static_cast<size_t>(op.phase)] += seconds;
    if (op.phase == StepPhase::kLoss && before != StepPhase::kLoss) ++losses;
    before = op.phase;
    const bool in_segment = op.segment >= 0;
    if (op.phase == StepPhase::kForward && in_segment)
      walk.forward[static_cast<size_t>(op.segment)] += seconds;
    else if ((op.phase == StepPhase::kBackward || op.phase == StepPhase::kRecompute) && in_segment)
      walk.backward[static_cast<size_t>(op.segment)] += seconds;
    else if (op.phase == StepPhase::kOptimizer)
      walk.optimizer += seconds;
    else if (op.phase == StepPhase::kGradNorm)
      walk.grad_norm += seconds;
    else
      walk.other += seconds;
  }
  walk.num_micro_steps = std::max<int64_t>(1, losses);
  for (auto* times : {&walk.forward, &walk.backward})
    for (double& seconds : *times) seconds /= static_cast<double>(walk.num_micro_steps);
  return walk;
}

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
  double all_reduce(double bytes) const { return 2 * half(bytes); }

 private:
  int64_t gpus_;
  double bytes_per_s_ = 1;
};

// What a walk over the segments waits for, and how long its collectives last.
struct Exchange {
  double exposed = 0, busy = 0;
};

// One micro-step's backward: segment i's gradients travel while i - 1 computes. At stage 3 the link also
// brings the weights of i - 1 meanwhile.
Exchange backward_exchange(const Walk& walk, const std::vector<double>& reduce,
                           const std::vector<double>& gather) {
  double compute = 0, link = 0, busy = 0, started = 0;
  for (size_t i = walk.backward.size(); i-- > 0;) {
    link = std::max(link, started) + gather[i];  // asked for when the segment before began
    started = std::max(compute, gather[i] > 0 ? link : 0.0);
    const double waited = started - compute;
    compute += waited + walk.backward[i];
    link = std::max(link, compute) + reduce[i];
    busy += gather[i] + reduce[i];
  }
  const double computing = std::accumulate(walk.backward.begin(), walk.backward.end(), 0.0);
  return {.exposed = std::max(compute, busy > 0 ? link : 0.0) - computing, .busy = busy};
}

Exchange forward_exchange(const Walk& walk, const std::vector<double>& gather) {
  double compute = 0, link = 0, busy = 0;
  for (size_t i = 0; i < walk.forward.size(); ++i) {
    link += gather[i];
    compute = std::max(compute, link) + walk.forward[i];
    link = std::max(link, compute - walk.forward[i]);  // the next is asked for when this one begins
    busy += gather[i];
  }
  const double computing = std::accumulate(walk.forward.begin(), walk.forward.end(), 0.0);
  return {.exposed = compute - computing, .busy = busy};
}

Exchange communication(const StepTrace& trace, const Walk& walk, const MachineProfile& machine,
                       const Sharding& sharding) {
  const Links links(machine, sharding.gpus);
  const double grad_bytes = static_cast<double>(bytes_per_element(trace, MemoryKind::kGradients)),
               weight_bytes = static_cast<double>(compute_bytes(trace));
  const size_t num_segments = trace.segment_weights.size();
  std::vector<double> reduce(num_segments), gather(num_segments), none(num_segments);
  double gather_all = 0;
  for (size_t i = 0; i < num_segments; ++i) {
    const double elements = static_cast<double>(trace.segment_weights[i]);
    reduce[i] = sharding.zero_stage == 0 ? links.all_reduce(elements * grad_bytes)
                                         : links.half(elements * grad_bytes);
    gather[i] = links.half(elements * weight_bytes);
    gather_all += gather[i];
  }
  // Gradients of earlier micro-steps stay at home while there is a whole buffer to add them in.
  const double micro_steps = static_cast<double>(walk.num_micro_steps),
               reducing = sharding.zero_stage >= 2 ? micro_steps : 1;
  const bool gathers = sharding.zero_stage == 3;
  const Exchange reducing_step = backward_exchange(walk, reduce, gathers ? gather : none);
  Exchange total{.exposed = reducing * reducing_step.exposed, .busy = reducing * reducing_step.busy};
  if (gathers) {
    const Exchange forward = forward_exchange(walk, gather);
    total.exposed += micro_steps * forward.exposed;
    total.busy += micro_steps * forward.busy;
  } else if (sharding.zero_stage >= 1) {  // the updated weights come back after the optimizer
    total.exposed += gather_all;
    total.busy += gather_all;
  }
  return total;
}

// Gradients go to the host, the update runs there over what the rank keeps, weights come back.
double host_update(const StepTrace& trace, const MachineProfile& machine, const Sharding& sharding) {
  double elements = 0;
  for (int64_t unit : trace.segment_weights)
    elements += static_cast<double>(sharding.zero_stage > 0 ? shard_elements(unit, sharding.gpus) : unit);
  const double grad_bytes = static_cast<double>(bytes_per_element(trace, MemoryKind::kGradients)),
               weight_bytes = static_cast<double>(compute_bytes(trace));
  double state_bytes = 0;
  for (MemoryKind kind : {MemoryKind::kMaster, MemoryKind::kMoments, MemoryKind::kEma})
    state_bytes += static_cast<double>(bytes_per_element(trace, kind));
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

int64_t shard_elements(int64_t elements, int64_t gpus) {
  const int64_t aligned = kShardAlignment * gpus;
  return (elements + aligned - 1) / aligned * kShardAlignment;
}

int64_t RankState::device_bytes() const {
  int64_t total = 0;
  for (const auto& [kind, bytes] : device) total += bytes;
  return total;
}

RankState shard_state(const StepTrace& trace, const Sharding& sharding) {
  const int64_t whole = sum(trace.segment_weights);
  int64_t share = 0;
  for (int64_t unit : trace.segment_weights) share += shard_elements(unit, sharding.gpus);
  const bool offloads = sharding.offload_optimizer != "none";

  RankState state;
  for (const auto& [kind, bytes] : trace.memory.persistent) {
    const bool sharded = sharding.zero_stage >= sharded_from(kind);
    const int64_t kept = sharded ? bytes_per_element(trace, kind) * share : bytes;
    if (!offloads || !is_optimizer_state(kind))
      state.device[kind] = kept;
    else if (sharding.offload_optimizer == "cpu")
      state.pinned_bytes += kept;
    else
      state.nvme_bytes += kept;
  }
  // f32: the weights that compute are the master where it is whole and at home, else a copy of their own.
  const bool master_is_split = sharding.zero_stage >= 1 || offloads;
  if (computes_in_master(trace) && master_is_split && sharding.zero_stage < 3)
    state.device[MemoryKind::kWeights] = 4 * whole;
  else if (computes_in_master(trace) && sharding.zero_stage == 3 && offloads)
    state.device[MemoryKind::kWeights] = 4 * share;

  if (sharding.zero_stage >= 2)  // gradients of the segment in backward and of the one on its way
    state.transient_bytes +=
        largest(trace.segment_weights, 2) * bytes_per_element(trace, MemoryKind::kGradients);
  if (sharding.zero_stage == 3)
    state.transient_bytes += largest(trace.segment_weights, kGatheredSegments) * compute_bytes(trace);
  if (offloads)  // gradients and weights pass through pinned buffers of one segment each
    state.pinned_bytes += largest(trace.segment_weights, 1) *
                          (bytes_per_element(trace, MemoryKind::kGradients) + compute_bytes(trace));
  return state;
}

StepTime time_step(const StepTrace& trace, const MachineProfile& machine, const Sharding& sharding) {
  StepTime time;
  const Walk walk = walk_of(trace, machine, time.by_phase);
  const double ranks = sharding.zero_stage >= 1 ? static_cast<double>(sharding.gpus) : 1;
  time.by_phase[static_cast<size_t>(StepPhase::kOptimizer)] = walk.optimizer / ranks;
  time.by_phase[static_cast<size_t>(StepPhase::kGradNorm)] = walk.grad_norm / ranks;
  if (sharding.offload_optimizer != "none") {
    time.host_s = host_update(trace, machine, sharding);
    time.by_phase[static_cast<size_t>(StepPhase::kOptimizer)] = time.host_s;
  }
  if (sharding.gpus > 1) {
    const Exchange exchange = communication(trace, walk, machine, sharding);
    time.by_phase[static_cast<size_t>(StepPhase::kCommunication)] = exchange.exposed;
    time.communication_s = exchange.busy;
  }
  time.seconds = std::accumulate(time.by_phase.begin(), time.by_phase.end(), 0.0);
  return time;
}

}  // namespace kiln
