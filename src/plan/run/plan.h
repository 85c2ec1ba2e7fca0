// What a training run will need and how fast it will be, before anything is rented.
#pragma once
#include <array>
#include <string>
#include <vector>

#include "plan/memory/plan_memory.h"

namespace kiln {

struct PlanOptions {
  TrainOptions train;
  std::string gpu = "cpu";  // a profile's name; "cpu": this machine
  int64_t gpus = 1;
  int64_t steps = 0;              // 0: train.max_steps
  int64_t dataset_size = 0;       // images; 0: those of the store, or ImageNet's 1,281,167
  double price_per_gpu_hour = 0;  // in any currency; 0: unknown
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

struct Plan : MemoryPlan {
  PlanOptions options;
  MachineProfile machine;
  DataShape data;
  int64_t num_weights = 0;  // trainable
  int64_t rank_batch = 0;   // images of one rank's step
  int64_t micro_batch = 0;  // images of one pass
  int64_t num_micro_steps = 1;
  double step_s = 0, images_per_s = 0;
  double peak_share = 0, mfu = 0;  // of the profile's peak, of the data sheet's (0: there is none)
  double communication_s = 0;      // that links are busy in a step; what is not hidden is in phase_s
  std::array<double, kNumStepPhases> phase_s{};
  std::vector<ScalingPoint> scaling;
  int64_t steps = 0;
  double days = 0, cost = 0, gpu_hours = 0, kilowatt_hours = 0;
  std::vector<Milestone> milestones;
  DataRate data_rate;
  int64_t dataset_size = 0, store_bytes = 0, checkpoint_bytes = 0;
  int64_t num_checkpoints = 0;  // kept on disk at the end
  std::vector<std::string> advice;
};

}  // namespace kiln
