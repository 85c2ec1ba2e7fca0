// What a training run will need and how fast it will be, before anything is rented.
#pragma once
#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "plan/memory/plan_memory.h"
#include "plan/price/machine_profile.h"
#include "plan/trace/trace.h"

namespace kiln {

struct PeakShare {
  double of_profile = 0, mfu = 0;  // of the profile's peak and of the data sheet's (0: there is none)
  // Why there is no share: it would be more than a device can reach, so the plan counts too much arithmetic
  // or too little time. One line that begins with "internal:" and names the operation. Empty: the share is
  // possible.
  std::string problem{};
};

// At most this share of a measured profile's peak is possible, since a product can beat the shape that
// measured it. Of other profiles' and of data sheets' peaks at most all is.
inline constexpr double kMostShare = 1.3;
// Returns the shares of a rank that takes `step_s` for the `images` of its step, which `trace` describes.
PeakShare peak_share_of(const StepTrace& trace, const MachineProfile& machine, int64_t images, double step_s);

using SettingText = std::function<std::string(const std::string& option, const std::string& value)>;
inline std::string option_on_command_line(const std::string& option, const std::string& value) {
  return "--" + option + " " + value;
}

struct PlanOptions {
  TrainOptions train;
  std::string gpu = "cpu";  // a profile's name; "cpu": this machine's processor
  int64_t gpus = 1;
  std::string gpu_memory{};       // of one GPU, as given: "12G"; empty: the profile's
  int64_t gpus_per_node = 0;      // 0: the profile's
  double network_gbit = 0;        // nominal, of a node, all its cards together, Gbit/s; 0: the profile's
  int64_t steps = 0;              // 0: train.max_steps
  int64_t dataset_size = 0;       // images; 0: those of the store, or ImageNet's 1,281,167
  double price_per_gpu_hour = 0;  // in any currency; 0: unknown
  bool has_scaling = true;        // the plan has the run on other numbers of GPUs too
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

// Where the samples come from, and what they take on a disk.
struct DataPlan {
  int64_t num_samples = 0;
  // What a store takes: latents (or pixels), and text features, each distinct caption once. 0 where pictures
  // are read.
  int64_t latent_bytes = 0, text_bytes = 0;
  double caption_bytes = 0;  // of one caption, on average
  bool reads_pictures = false;
  int64_t picture_bytes = 0;                // of all files
  std::map<std::string, double> formats{};  // share of each file format
  double mean_height = 0, mean_width = 0;   // of pictures as stored
  double decode_s = 0;                      // of one thread for one picture, on the plan's machine
  double read_bytes = 0;                    // of one sample of a step
  std::string assumed{};                    // what of the above is an assumption; empty: nothing
  std::string file_system{};                // of the data, if they are here
  bool is_network = false;                  // that file system is behind a network
  int64_t store_bytes() const { return latent_bytes + text_bytes; }
  int64_t disk_bytes() const { return reads_pictures ? picture_bytes : store_bytes(); }
};

// How much data the steps of all ranks of one node take, and how fast it can come.
struct DataRate {
  double images_per_s = 0;
  double bytes_per_s = 0;          // read from the store, or from pictures
  double disk_bytes_per_s = 0;     // by the profile
  double loader_images_per_s = 0;  // what --loader-threads draw
  // How many times as long the run takes because of a loader or disk that is slower than the steps; 1: no
  // longer.
  double slowdown() const {
    double slowest = images_per_s;
    if (loader_images_per_s > 0) slowest = std::min(slowest, loader_images_per_s);
    if (disk_bytes_per_s > 0 && bytes_per_s > disk_bytes_per_s)
      slowest = std::min(slowest, images_per_s * disk_bytes_per_s / bytes_per_s);
    return slowest > 0 ? images_per_s / slowest : 1;
  }
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
  double extraction_days = 0;  // of kiln extract on the same devices; 0: the run encodes nothing
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
  int64_t num_weights = 0;       // trainable
  int64_t num_base_weights = 0;  // that an adapter changes
  double flops_per_image = 0;    // forward and backward
  int64_t rank_batch = 0;        // images of one rank's step
  int64_t micro_batch = 0;       // images of one pass
  int64_t num_micro_steps = 1;
  // What encodes pictures and captions while the run trains; absent: it reads features, or pixels.
  std::optional<AutoencoderOutline> picture_encoder{};
  std::optional<TextEncoderOutline> caption_encoder{};
  std::vector<LaneSpeed> lane_speeds;   // empty: not asked for, or a single lane
  double half_precision_speed = 0;      // how many times as fast the run is in bf16 or fp16; 0: not compared
  std::vector<MeasuredSpeed> measured;  // by others, on as many GPUs of this kind
  DataPlan samples;
  int64_t checkpoint_bytes = 0;
  int64_t num_checkpoints = 0;  // kept on disk at the end
  // Bytes that each optimizer, by name, would keep for these weights on all ranks together, without masters.
  std::map<std::string, int64_t> optimizer_bytes;
  std::vector<std::string> advice;
};

// A plan's weights, samples and cost in words: how many they are, what they take on a disk, and how fast they
// come.
//
// Returns "675 M weights", or "860 M weights, adapter of 3.2 M".
std::string weights_text(const Plan& plan);
std::string samples_text(const DataPlan& data);
std::string rate_text(const Plan& plan);
// Returns `before` and the cost, "1234", "12.34" or "< 0.01". Empty where the plan knows no price.
std::string cost_text(const PlanOptions& options, double cost, const char* before = "");

}  // namespace kiln
