// Reports on a run while it runs: the progress line, log.jsonl and TensorBoard.
#pragma once
#include <ATen/core/Tensor.h>

#include <array>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "core/json.h"
#include "parallel/cpu_share.h"
#include "parallel/nvml.h"
#include "step/step.h"
#include "watch/loss_groups.h"
#include "watch/phase_timers.h"
#include "watch/run_log.h"
#include "watch/tensorboard.h"

namespace kiln {

struct MonitorOptions {
  std::string run;
  int64_t global_batch = 0, max_steps = 0, log_every = 1;
  double steps_ahead = 0;  // length of later stages, in steps of this one
  double max_seconds = 0;  // time limit of training; 0 = none
  double peak_flops = 0;   // of the machine, measured with a matrix product
  double sheet_flops = 0;  // of its GPUs by the data sheet; 0 if there is none
  at::Device device = at::kCPU;
  int64_t num_gpus = 1;  // GPUs of the run's ranks on this machine, counted from `device`
  bool tensorboard = true;
  double quiet_seconds = 30;         // longest silence on the terminal
  std::vector<std::string> terms{};  // Objective::term_names(); several are logged by name
  // Names of the samples' sources and of the batches' shapes, to log losses by. Empty if there is only one.
  std::vector<std::string> sources{}, buckets{};
};

// A finished step.
struct StepReport {
  int64_t step = 0;      // 1-based
  bool is_last = false;  // of the run or its stage
  int64_t images_seen = 0;
  double lr = 0;
  double train_seconds = 0;    // since the start of the run, earlier processes included
  double stall_seconds = 0;    // spent waiting for the loader
  EncodingTimes encoding_s{};  // spent encoding the batch
  int64_t batches_ready = 0;   // in the loader when this step asked for one
  double flops = 0;            // of all ranks, forward and backward, without recomputation
  const StepResult* result = nullptr;
  std::vector<double> positions;  // (B) positions of the timesteps in the schedule, [0, 1]
  // Indices into MonitorOptions' sources (B) and buckets (of the whole batch).
  std::vector<int64_t> sources{};
  int64_t bucket = 0;
};

// The loss on held-out samples.
struct ValidationLoss {
  int64_t num_images = 0;
  double loss = 0;                    // the objective's mean over the images
  std::array<double, 4> quartiles{};  // by quarter of the schedule, cleanest first; NaN without images
};

class Monitor {
 public:
  // `from_step`: the checkpoint this process continues from; 0 for a fresh run.
  Monitor(const MonitorOptions& options, int64_t from_step);

  // An observer of the step. Call its end_step() after each step.
  PhaseTimers& timers() { return timers_; }

  // Collects a step. Every log_every steps and after the last one writes a line to the terminal, log.jsonl
  // and TensorBoard. Its losses are means over the steps since the previous line at a multiple of log_every.
  // If lines are far apart, the terminal shows signs of life in between.
  void step(const StepReport& report);
  // Writes an event to log.jsonl: resume, skipped, checkpoint, ...
  void event(const nlohmann::json& line) { log(line); }
  // Reports the loss on held-out samples to the terminal, log.jsonl and TensorBoard. Call it between pause()
  // and resume(). `weights`: the weights that were validated.
  void validation(int64_t step, const ValidationLoss& loss, const std::string& weights);
  // Reports metrics of drawn pictures likewise: {"metrics": ..., "protocol": ..., "stamp": ...}.
  void evaluation(int64_t step, const nlohmann::json& result);
  void image(const std::string& tag, const std::vector<uint8_t>& png, int64_t height, int64_t width,
             int64_t step);
  // Time that is not training (checkpoints, sample grids) does not count in images/s.
  void pause();
  void resume();
  ByProducts& by_products() { return by_products_; }  // those of the monitor are among them

  // Returns the steps collected since the last line, for a checkpoint between two lines. With it a resumed
  // run logs the same losses.
  nlohmann::json window() const;
  void restore_window(const nlohmann::json& window);

 private:
  using Clock = std::chrono::steady_clock;
  struct Window {
    int64_t steps = 0;  // with a finite loss
    double loss = 0;    // sum
    double quartile_loss[4] = {}, quartile_count[4] = {};
    LossGroups by_term, by_source, by_bucket;
    // Not saved: they describe this process.
    int64_t timed_steps = 0, batches_ready = 0;
    double stall_seconds = 0, flops = 0;
    EncodingTimes encoding_s{};
    int64_t num_readings = 0;
    std::vector<GpuReading> gpus{};  // sums
  };
  nlohmann::json measure(const StepReport& report);
  nlohmann::json phase_seconds();
  void add_gpu(nlohmann::json& line) const;
  void read_gpu();
  void add_taken(nlohmann::json& line);
  void print(const nlohmann::json& line, double train_seconds);
  std::string used_text(const nlohmann::json& line);
  void say_alive(const StepReport& report);
  std::string time_left_text(int64_t step, double train_seconds, const char* separator) const;
  void open_log();
  void log(const nlohmann::json& line);
  void tell_tensorboard(const std::function<void(EventWriter& events)>& tell);
  static void add_scalars(EventWriter& events, const nlohmann::json& line);

  MonitorOptions options_;
  ByProducts by_products_;
  std::unique_ptr<RunLog> log_;          // null: it could not be opened so far
  std::unique_ptr<EventWriter> events_;  // null: not asked for, or it failed
  PhaseTimers timers_;
  std::vector<std::unique_ptr<Nvml>> gpus_;  // those the driver reports on; this rank's comes first
  Clock::time_point last_reading_{};
  Window window_;
  Clock::time_point window_begin_ = Clock::now(), pause_begin_{}, printed_at_ = Clock::now();
  ProcessorTimes window_times_ = processor_times(), pause_times_{};
  int64_t first_step_;
  double first_train_seconds_ = -1;
  bool warned_of_memory_ = false, told_of_others_ = false;
};

}  // namespace kiln
