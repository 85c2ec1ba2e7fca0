// What a training run will need and how fast it will be, before anything is rented.
#pragma once
#include <array>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "plan/memory/plan_memory.h"
#include "plan/run/peak_share.h"

namespace kiln {

using SettingText = std::function<std::string(const std::string& option, const std::string& value)>;
inline std::string option_on_command_line(const std::string& option, const std::string& value) {
  return "--" + option + " " + value;
}

struct PlanOptions {
  TrainOptions train;
  std::string gpu = "cpu";  // a profile's name; "cpu": this machine's processor
  int64_t gpus = 1;
  int64_t gpu_memory = 0;         // bytes of one GPU; 0: the profile's
  int64_t steps = 0;              // 0: train.max_steps
  int64_t dataset_size = 0;       // images; 0: those of the store, or ImageNet's 1,281,167
  double price_per_gpu_hour = 0;  // in any currency; 0: unknown
  // How advice says that an option gets a value: "--zero-stage 2", or the key of the file that sets it.
  SettingText change = option_on_command_line;
};

// The run with the same micro-batches per GPU on another number of GPUs, for as many images in all.
struct ScalingPoint {
  int64_t gpus = 0;
  double step_s = 0, images_per_s = 0, efficiency = 0, days = 0, cost = 0;
};

struct Milestone {
  std::string name;
  int64_t steps = 0;
  double days = 0, cost = 0;
};

// A speed that others measured, and the plan of that run.
struct MeasuredSpeed {
  std::string source, options;  // who, and how: "fp16, recompute all"
  int64_t gpus = 0, global_batch = 0;
  double steps_per_s = 0, planned_steps_per_s = 0;
};

// How much data the steps of all ranks of one node take, and how fast it can come.
struct DataRate {
  double images_per_s = 0;
  double bytes_per_s = 0;          // read from the store
  double disk_bytes_per_s = 0;     // by the profile
  double loader_images_per_s = 0;  // what --loader-threads draw
};

// The time of batches as they usually are: captions of the mean length, pictures of the mean area.
struct TimePlan {
  double step_s = 0, images_per_s = 0;
  double time_error = 0;      // such steps are expected within this share of step_s; 0: not known
  double measured_share = 0;  // of the step, in operations that were measured in their exact shapes
  PeakShare peak_share{};
  double encoding_s = 0;          // part of step_s: encoding pictures and captions on the way
  double caption_encoding_s = 0;  // part of encoding_s: captions
  double communication_s = 0;     // time that links are busy in a step; what nothing hides is in phase_s
  std::array<double, kNumStepPhases> phase_s{};
  std::vector<ScalingPoint> scaling;
  int64_t steps = 0;
  double days = 0, cost = 0, gpu_hours = 0, kilowatt_hours = 0;
  std::vector<Milestone> milestones;
  DataRate data_rate;
};

// The speed of steps of one lane, with captions of the mean length.
struct LaneSpeed {
  Lane lane;
  double step_s = 0, images_per_s = 0;
};

// The plan of a run. Its memory is that of the largest batch.
struct Plan : MemoryPlan, TimePlan {
  PlanOptions options;
  MachineProfile machine;
  DataShape data;
  int64_t num_weights = 0;     // trainable
  double flops_per_image = 0;  // forward and backward
  int64_t rank_batch = 0;      // images of one rank's step
  int64_t micro_batch = 0;     // images of one pass
  int64_t num_micro_steps = 1;
  std::vector<LaneSpeed> lane_speeds;   // empty: not asked for, or a single lane
  double half_precision_speed = 0;      // how many times as fast the run is in bf16 or fp16; 0: not compared
  std::vector<MeasuredSpeed> measured;  // by others, on as many GPUs of this kind
  int64_t dataset_size = 0, store_bytes = 0, checkpoint_bytes = 0;
  int64_t num_checkpoints = 0;  // kept on disk at the end
  // Bytes that each optimizer, by name, would keep for these weights on all ranks together, without masters.
  std::map<std::string, int64_t> optimizer_bytes;
  std::vector<std::string> advice;
};

}  // namespace kiln
