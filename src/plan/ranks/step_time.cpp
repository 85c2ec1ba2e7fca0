#include "plan/ranks/step_time.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <stdexcept>
#include <unordered_map>

#include "plan/price/price.h"

namespace kiln {

namespace {

// One rank's update on the host is bound by memory and has half a socket.
constexpr double kHostUpdateBytesPerS = 40e9;

// Assumption, until a GPU has run it: a second of an update beside products takes so much from them, since
// both need multiprocessors.
constexpr double kBesideCost = 0.45;

// A rank's step: its operations one after another, collectives one after another on the link beside them.
class StepClock {
 public:
  StepClock(const StepTrace& trace, const std::vector<std::vector<double>>& op_seconds, const Links& links)
      : trace_(trace), links_(links) {
    for (size_t i = 0; i < trace.spans.size(); ++i)
      compute_.push_back(seconds_between(trace.spans[i].collectives, op_seconds[i]));
  }

  // Runs two steps and keeps the times of the second one, which is steady.
  void run() {
    step();
    // What the first step has sent at its end is under way when the second one begins.
    std::vector<double> arrivals;
    for (size_t i = begun_.size(); i-- > 0 && arrivals.size() < trace_.under_way.size();)
      arrivals.push_back(arrival_[begun_[i]] - now_);
    std::ranges::reverse(arrivals);
    arrival_.clear();
    for (size_t i = 0; i < arrivals.size(); ++i) arrival_[trace_.under_way[i].start.number] = arrivals[i];
    link_ = std::max(0.0, link_ - now_);
    now_ = waited_ = busy_ = 0;
    step();
  }
  double waited_seconds() const { return waited_; }
  double busy_seconds() const { return busy_; }

 private:
  // Returns the seconds of the operations before each event of a span, and after its last one.
  static std::vector<double> seconds_between(const std::vector<CollectiveEvent>& events,
                                             const std::vector<double>& op_seconds) {
    std::vector<double> between(events.size() + 1);
    size_t event = 0;
    for (size_t op = 0; op < op_seconds.size(); ++op) {
      while (event < events.size() && events[event].before_op <= op) ++event;
      between[event] += op_seconds[op];
    }
    return between;
  }

  void step() {
    repeated_ = 0;
    begun_.clear();
    for (size_t i = 0; i < trace_.spans.size();) {
      // The spans of equal micro-steps run again and again. Each waits for what the one before has begun.
      size_t end = i + 1;
      const int64_t times = trace_.spans[i].times;
      while (times > 1 && end < trace_.spans.size() && trace_.spans[end].times == times) ++end;
      for (int64_t n = 0; n < times; ++n) {
        const size_t num_begun = begun_.size();
        for (size_t span = i; span < end; ++span) run(span);
        if (n + 1 < times) repeated_ += static_cast<int64_t>(begun_.size() - num_begun);
      }
      i = end;
    }
  }

  void run(size_t index) {
    const std::vector<CollectiveEvent>& events = trace_.spans[index].collectives;
    for (size_t event = 0; event < events.size(); ++event) {
      now_ += compute_[index][event];
      begin_or_await(events[event]);
    }
    now_ += compute_[index].back();
  }

  // Queues a collective on the link, or waits for one that was queued. Where links are not beside the
  // compute, a collective takes its time at once.
  void begin_or_await(const CollectiveEvent& event) {
    const int64_t number = event.start.number + repeated_;
    double& arrival = arrival_[number];
    if (event.begins) {
      const double seconds = links_.seconds(event.start);
      busy_ += seconds;
      if (!links_.are_beside_compute()) {
        waited_ += seconds;
        now_ += seconds;
      }
      arrival = link_ = links_.are_beside_compute() ? std::max(link_, now_) + seconds : now_;
      begun_.push_back(number);
    } else if (arrival > now_) {
      waited_ += arrival - now_;
      now_ = arrival;
    }
  }

  const StepTrace& trace_;
  const Links& links_;
  std::vector<std::vector<double>> compute_;  // seconds_between() of each span
  // By number of the collective. Each of several equal micro-steps has numbers of its own: `repeated_` more.
  std::unordered_map<int64_t, double> arrival_;
  std::vector<int64_t> begun_;  // numbers, in order
  int64_t repeated_ = 0;
  double now_ = 0, link_ = 0, waited_ = 0, busy_ = 0;
};

// Returns the number of ranks that state is divided among.
int64_t shards_of(const Sharding& sharding) {
  return sharding.ranks_per_node > 0 ? sharding.ranks_per_node : sharding.gpus;
}

// Returns the seconds in which gradients go to the host, the update of what the rank keeps runs there, and
// weights come back.
double host_update(const StepTrace& trace, const MachineProfile& machine, const Sharding& sharding) {
  double elements = 0;
  for (const int64_t unit : trace.segment_weights)
    elements += static_cast<double>(
        shard_elements(unit, {.zero_stage = sharding.zero_stage, .world_size = shards_of(sharding)}));
  const double grad_bytes = static_cast<double>(c10::elementSize(trace.unit.grad_dtype)),
               weight_bytes = static_cast<double>(c10::elementSize(trace.unit.compute_dtype)),
               state_bytes = static_cast<double>(trace.state_bytes);
  const double moved = 2 * state_bytes + elements * (grad_bytes + weight_bytes);  // read and written
  double seconds = moved / kHostUpdateBytesPerS;
  if (machine.host_link_bytes_per_s > 0 && machine.device == DryRunDevice::kCuda)
    seconds += elements * (grad_bytes + weight_bytes) / machine.host_link_bytes_per_s;
  if (sharding.offload.optimizer == Placement::kNvme && offload_disk(machine) > 0) {
    const auto sharing = static_cast<double>(ranks_on_node(machine, sharding.gpus));
    seconds += 2 * state_bytes * sharing / offload_disk(machine);
  }
  return seconds;
}

// Returns the seconds in which inputs of segments go to the host and come back, in every micro-step.
double activation_transfers(const StepTrace& trace, const MachineProfile& machine) {
  if (machine.host_link_bytes_per_s <= 0 || machine.device != DryRunDevice::kCuda) return 0;
  return 2 * static_cast<double>(num_micro_steps(trace) * trace.offloaded_activation_bytes) /
         machine.host_link_bytes_per_s;
}

// Seconds of weights that wait elsewhere: they come for every gather and go back after the update.
struct WeightTransfers {
  double link_s = 0, disk_s = 0;
};

WeightTransfers weight_transfers(const StepTrace& trace, const MachineProfile& machine,
                                 const Sharding& sharding) {
  WeightTransfers transfers;
  const Placement placement =
      sharding.offload.on(trace.device == DryRunDevice::kCuda).at_stage(sharding.zero_stage).params;
  if (placement == Placement::kDevice) return transfers;
  double bytes = 0;
  for (const int64_t unit : trace.segment_weights)
    bytes += static_cast<double>(shard_elements(unit, {.zero_stage = 3, .world_size = shards_of(sharding)})) *
             static_cast<double>(c10::elementSize(trace.unit.compute_dtype));
  bytes *= static_cast<double>(2 * num_micro_steps(trace) + 1);  // forward and backward; the update
  if (machine.host_link_bytes_per_s > 0 && machine.device == DryRunDevice::kCuda)
    transfers.link_s = bytes / machine.host_link_bytes_per_s;
  if (placement == Placement::kNvme && offload_disk(machine) > 0)
    transfers.disk_s =
        bytes * static_cast<double>(ranks_on_node(machine, sharding.gpus)) / offload_disk(machine);
  return transfers;
}

// Returns the seconds in which an operation leaves the memory idle.
double idle_memory_seconds(const OpRecord& op, double seconds, const MachineProfile& machine) {
  const double rate = machine.memory_bytes_per_s * machine.bandwidth_efficiency;
  return rate > 0 ? std::max(0.0, seconds - op.bytes / rate) : 0;
}

// Returns what an update costs that runs beside the next forward. It moves bytes while the forward's
// operations leave the memory idle, unit by unit, and a segment waits for the units up to its own.
double update_beside(const StepTrace& trace, const std::vector<std::vector<double>>& op_seconds,
                     const MachineProfile& machine) {
  double all = 0;
  std::map<int32_t, double> until;  // the end of a segment's unit, in seconds of update
  for (size_t i = 0; i < trace.spans.size(); ++i)
    if (trace.spans[i].phase == StepPhase::kOptimizer)
      until[trace.spans[i].segment] = all += std::accumulate(op_seconds[i].begin(), op_seconds[i].end(), 0.0);
  double done = 0, waited = 0;
  for (size_t i = 0; i < trace.spans.size() && trace.spans[i].micro_step <= 0; ++i) {
    const Span& span = trace.spans[i];
    if (span.phase != StepPhase::kForward) continue;
    const double wait = std::max(0.0, until[span.segment] - done);
    waited += wait;
    done += wait;
    for (size_t op = 0; op < span.ops.size(); ++op)
      done += idle_memory_seconds(span.ops[op], op_seconds[i][op], machine);
    done = std::min(done, all);
  }
  waited += all - done;  // a head's, for which the loss waits
  return waited + kBesideCost * (all - waited);
}

// Returns the seconds of each operation of each span. What runs on the host counts in host_update().
std::vector<std::vector<double>> op_seconds(const StepTrace& trace, const MachineProfile& machine,
                                            const Sharding& sharding) {
  const bool offloads = sharding.offload.optimizer != Placement::kDevice;
  std::vector<std::vector<double>> seconds;
  for (const Span& span : trace.spans) {
    const bool on_host =
        offloads && (span.phase == StepPhase::kOptimizer || span.phase == StepPhase::kOffload);
    std::vector<double>& of_span = seconds.emplace_back();
    for (const OpRecord& op : span.ops)
      of_span.push_back(on_host ? 0 : price(op, machine, trace.options.compute));
  }
  return seconds;
}

}  // namespace

StepTime time_step(const StepTrace& trace, const MachineProfile& machine, const Sharding& sharding) {
  if (trace.world_size != sharding.gpus || trace.zero.stage != sharding.zero_stage ||
      trace.ranks_per_node != sharding.ranks_per_node)
    throw std::logic_error("the time of a rank from the trace of another");
  StepTime time;
  std::vector<std::vector<double>> seconds = op_seconds(trace, machine, sharding);
  for (size_t i = 0; i < seconds.size(); ++i)
    time.by_phase[static_cast<size_t>(trace.spans[i].phase)] +=
        std::accumulate(seconds[i].begin(), seconds[i].end(), 0.0) *
        static_cast<double>(trace.spans[i].times);
  if (sharding.offload.optimizer != Placement::kDevice) {
    time.host_s = host_update(trace, machine, sharding);
    time.by_phase[static_cast<size_t>(StepPhase::kOptimizer)] = time.host_s;
  }
  if (updates_beside(trace)) {
    double& update_s = time.by_phase[static_cast<size_t>(StepPhase::kOptimizer)];
    const double share = update_beside(trace, seconds, machine) / std::max(update_s, 1e-12);
    update_s *= share;
    for (size_t i = 0; i < seconds.size(); ++i)  // communication hides behind no more than that
      if (trace.spans[i].phase == StepPhase::kOptimizer)
        for (double& of_op : seconds[i]) of_op *= share;
  }
  if (sharding.gpus > 1) {
    const Links links(machine, sharding.gpus);
    StepClock clock(trace, seconds, links);
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
