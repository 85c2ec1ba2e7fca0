// The options of a training run. Options of one component stand in a struct beside that component; this file
// has the options of the run itself, and the whole. run/option_table.h gives each its name on the command
// line.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/choices.h"
#include "core/json.h"
#include "diffusion/objective_options.h"
#include "models/model_options.h"
#include "models/text/caption_options.h"
#include "optim/ema.h"
#include "optim/loss_scaler.h"
#include "optim/lr_schedule.h"
#include "optim/optimizer_options.h"
#include "parallel/machine.h"
#include "parallel/offload/state_placement.h"
#include "run/memory_options.h"

namespace kiln {

struct DataOptions {
  std::string path;               // a feature store, "synthetic", or images, which need an autoencoder
  std::vector<std::string> more;  // further feature stores to train on together with it
  std::vector<double> weights;    // how often samples of each store come, of `path` first; empty: 1
  // Number of parts to take of each store, from the first one on, since a store may have grown. Empty: all.
  // Set where a stage begins; not an option.
  std::vector<int64_t> parts;
  // RunPictures::left_out() of a stage that goes on, as JSON. "": it begins. Set likewise.
  std::string left_out;
  std::string autoencoder;   // encodes images while training: a path, or "pixels"
  int64_t image_size = 256;  // on the command line: the store's own, else the model's
  // For pictures: "" brings all to image_size x image_size. Otherwise a table of sizes, and each picture goes
  // to the nearest: pixart (the published table of image_size) or HxW,HxW,...
  std::string buckets;
  int64_t bucket_min = 1;  // buckets of fewer pictures join others; 1: none do
  std::string text;        // text store beside the features; empty: the only one, if the model takes captions
  double text_dropout_prob = 0.1;  // probability of training without the caption, for guidance
  // Folder of the encoder of captions if --data are pictures, else of prompts. Empty: the one that the text
  // store names.
  std::string text_encoder;
  CaptionEncodingOptions captions{};  // that are encoded while training; `encoder` and `name` are not used
  bool enlarge = false;               // enlarge images smaller than image_size, which otherwise are left out
  bool flip = true;                   // mirror with probability 1/2, if the data allow it
  bool draw_posterior = true;         // draw from the autoencoder's posterior; false: use its mean
  int64_t loader_threads = 1;
  int64_t prefetch = 4;  // batches drawn ahead

  bool is_synthetic() const { return path == "synthetic"; }
  std::string folder() const { return is_synthetic() ? "" : path; }  // on a disk; empty: nothing is read
  bool in_pixels() const { return autoencoder == "pixels"; }
};

struct RanksOptions {
  int64_t nproc = 0;                 // ranks to start on this machine; 0: one, or what the launcher says
  double collective_timeout = 1800;  // seconds after which a stuck collective ends the run
};

// Where a checkpoint's state is copied before training goes on.
enum class CheckpointCopy {
  kAuto,       // state on a GPU goes to memory, state on the host to the files
  kMemory,     // host memory of this process, as large as this rank's share of the state; a thread writes it
  kPageCache,  // the files, unit by unit: memory of the system, which a thread's fsync writes to the disk
};
template <>
struct Choices<CheckpointCopy> {
  static constexpr std::pair<CheckpointCopy, const char*> kAll[] = {
      {CheckpointCopy::kAuto, "auto"},
      {CheckpointCopy::kMemory, "memory"},
      {CheckpointCopy::kPageCache, "page-cache"}};
};

struct CheckpointOptions {
  int64_t every = 5000;  // steps; 0: only at the end
  int64_t keep = 0;      // newest ones; 0: all
  CheckpointCopy copy = CheckpointCopy::kAuto;
};

struct ValidationOptions {
  std::string data;      // samples that are not trained on; empty: only those of `share`
  double share = 0;      // share of the training samples that is held out; 0: none
  int64_t every = 5000;  // steps; 0: only at the end
  int64_t images = 0;    // images of a validation; 0: all

  bool is_on() const { return !data.empty() || share > 0; }
};

// A range of steps, 1-based, both ends included.
struct StepRange {
  int64_t first = 0, last = 0;

  // Parses "FROM:TO", or "" for no steps. Throws Error.
  static StepRange parse(const std::string& text);
  bool empty() const { return last == 0; }
  std::string text() const;
};

struct WatchOptions {
  int64_t log_every = 100;  // steps between lines of log.jsonl and the terminal
  bool tensorboard = true;
  double peak_tflops = 0;                            // of each rank's device; 0: measured
  double cost_per_hour = 0, price_per_gpu_hour = 0;  // of the whole run; of each GPU or rank; 0: unknown
  StepRange profile{};                               // steps to write a Chrome trace of
};
// Returns the cost of an hour of the run; 0: unknown.
inline double cost_per_hour_of(const WatchOptions& options, int64_t world_size) {
  return options.cost_per_hour + options.price_per_gpu_hour * static_cast<double>(world_size);
}

// Grids of samples that are drawn during training.
struct SampleGridOptions {
  int64_t every = 0;  // steps; 0: none
  int64_t num_samples = 8, num_sampling_steps = 50;
  std::string sampler;  // one of sampler_names(); empty: the objective's
  double cfg_scale = 4;
  std::vector<int64_t> classes{};      // empty: spread over all
  std::vector<std::string> prompts{};  // drawn in turn; empty: captions of samples spread over all
};

// Evaluations of images that are drawn during training, as kiln evaluate makes them.
struct EvaluationOptions {
  int64_t every = 0;  // steps; 0: none
  int64_t images = 256;
  std::string reference;       // what the images are compared with
  std::string net = "random";  // random, inception or dinov2
  std::string net_weights;
};

// A part of a run with settings of its own (run/stage_options.h).
struct StageOptions {
  std::string name;                                    // for people; may be empty
  double epochs = 0;                                   // passes over its data; 0: `steps` is given
  int64_t steps = 0;                                   // length of this stage; 0: `epochs` is given
  nlohmann::json settings = nlohmann::json::object();  // option -> value, over the run's
};

struct TrainOptions {
  std::string out;  // the run folder
  uint64_t seed = 0;
  std::vector<StageOptions> stages{};  // empty: the run is a single stage
  double epochs = 0;                   // passes over the data; 0: use max_steps
  int64_t max_steps = 400000;
  double max_minutes = 0;  // 0: no limit
  int64_t global_batch = 256;
  int64_t micro_batch = 0;     // images per pass; 0: the whole batch, -1: the best fit for memory.budget
  int64_t max_bad_steps = 10;  // more non-finite steps in a row end the run

  ModelOptions model{};
  LoraOptions lora{};
  DataOptions data{};
  ObjectiveOptions objective{};
  OptimizerOptions optimizer{};
  LrSchedule lr{};
  LossScalerOptions loss_scale{};
  EmaOptions ema{};
  ComputeOptions compute{};
  MemoryOptions memory{};
  RanksOptions ranks{};
  ZeroOptions zero{};
  OffloadOptions offload{};
  CheckpointOptions checkpoints{};
  ValidationOptions validation{};
  WatchOptions watch{};
  SampleGridOptions samples{};
  EvaluationOptions evaluation{};

  // --micro-batch -1: the plan chooses what fits the memory budget.
  bool chooses_micro_batch() const { return micro_batch == -1; }
};

// Throws Error for impossible values, naming the option and what to do.
void validate(const TrainOptions& options);

}  // namespace kiln
