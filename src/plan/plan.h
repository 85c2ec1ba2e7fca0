// `kiln plan`: what a training run will need and how fast it will be, before anything is rented.
#pragma once
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "plan/machine_profile.h"
#include "plan/sharding.h"
#include "plan/trace.h"
#include "train/prediction.h"

namespace kiln {

struct PlanOptions {
  TrainOptions train;
  std::string gpu = "cpu";  // a profile's name; "cpu": this machine
  int64_t gpus = 1;
  int64_t steps = 0;              // 0: train.max_steps
  int64_t dataset_size = 0;       // images; 0: those of the store, or ImageNet's 1,281,167
  double price_per_gpu_hour = 0;  // in any currency; 0: unknown
};

// Bytes in each place, of one rank.
struct Footprint {
  int64_t device = 0, host = 0, pinned_host = 0, nvme = 0;
};

struct PhasePlan {
  std::string name;        // load, first step, steady step, validation, validation sampling, checkpoint, ...
  int64_t live_bytes = 0;  // the most of tensors on the device
  Footprint bytes;         // at its peak, with all that is no tensor; on a CPU everything is on the device
};

// The same micro-batches per GPU on another number of GPUs, for the same number of images in all.
struct ScalingPoint {
  int64_t gpus = 0;
  double step_s = 0, images_per_s = 0, efficiency = 0, days = 0, cost = 0;
};

struct Milestone {
  std::string name;
  int64_t steps = 0;
  double days = 0, cost = 0;
};

// What the step eats, against what feeds it: of all ranks of one node.
struct DataRate {
  double images_per_s = 0;
  double bytes_per_s = 0;          // read from the store
  double disk_bytes_per_s = 0;     // of the profile
  double loader_images_per_s = 0;  // that --loader-threads draw
};

struct Plan {
  PlanOptions options;
  MachineProfile machine;
  DataShape data;
  int64_t num_weights = 0;  // trainable
  int64_t rank_batch = 0;   // images of one rank's step
  int64_t micro_batch = 0;  // images of one pass
  int64_t num_micro_steps = 1;
  std::vector<PhasePlan> phases;
  // What is alive on one rank's device at the peak of the steady step, in bytes: MemoryKind's names,
  // autoencoder, and gathered (whole weights and gradients on their way among ranks). Sums to peak_bytes.
  std::map<std::string, int64_t> by_kind;
  std::map<std::string, int64_t> overhead;  // beside it: context, communication (NCCL), allocator
  int64_t peak_bytes = 0;                   // live allocated bytes at the peak of the steady step
  int64_t reserved_bytes = 0;               // with the caching allocator's rounding and fragmentation (CUDA)
  int64_t needed_bytes = 0;                 // of the device, over all phases: reserved and context
  std::string needed_phase;                 // which of `phases` that is
  std::string peak_phase, peak_segment;     // of the steady step: "backward", "blocks.27"
  bool fits = false;
  double step_s = 0, images_per_s = 0, peak_share = 0;
  double communication_s = 0;  // that links are busy in a step; what is not hidden is in phase_s
  std::array<double, kNumStepPhases> phase_s{};
  std::vector<ScalingPoint> scaling;
  int64_t steps = 0;
  double days = 0, cost = 0, gpu_hours = 0, kilowatt_hours = 0;
  std::vector<Milestone> milestones;
  DataRate data_rate;
  int64_t dataset_size = 0, store_bytes = 0, checkpoint_bytes = 0;
  int64_t num_checkpoints = 0;             // kept on disk at the end
  std::vector<std::string> advice, notes;  // notes: what this plan leaves out
  MemoryCurve curve;                       // of memory by kind over the step
  std::vector<std::string> segments;
};

// Throws Error: unknown GPU, a batch that the GPUs do not divide, a stage without ranks, options that cannot
// be trained.
Plan make_plan(const PlanOptions& options);

// The parts of make_plan, for a search over many configurations. The trace is, on `data` and the machine's
// kind of device, of options.train on options.gpus ranks; or of one rank with its share of the batch, from
// which plan/rank_walk.h then makes it.
MachineProfile planned_machine(const PlanOptions& options);  // of --gpu, in TF32 where that is asked for
void check_plan(const PlanOptions& options, const MachineProfile& machine);  // throws what make_plan throws
Plan compose_plan(const PlanOptions& options, const MachineProfile& machine, const DataShape& data,
                  const StepTrace& trace);

nlohmann::json to_json(const Plan& plan);  // {"predicted": {peak_bytes, by_kind, by_phase, step_s, ...}, ...}
std::string to_text(const Plan& plan);
std::string to_html(const Plan& plan);

}  // namespace kiln
