// Reports on a run while it runs: the progress line, log.jsonl and TensorBoard.
#pragma once
#include <ATen/core/Tensor.h>

#include <array>
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

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
  double steps_ahead = 0;      // that follow max_steps, as long as those before it
  double max_seconds = 0;      // time limit of training; 0 = none
  double flops_per_image = 0;  // of forward and backward, recomputation not counted
  double peak_flops = 0;       // of the machine, as a product measured it
  double sheet_flops = 0;      // of its GPUs by the data sheet; 0: there is none
  at::Device device = at::kCPU;
  int64_t num_gpus = 1;  // that the run's ranks on this machine have, from `device` on
  bool tensorboard = true;
  double quiet_seconds = 30;  // on the terminal, at most
  // Where samples come from, and shapes of batches, whose losses are told apart; none where there is one.
  std::vector<std::string> sources{}, buckets{};
};

// A finished step.
struct StepReport {
  int64_t step = 0;  // 1-based
  int64_t images_seen = 0;
  double lr = 0;
  double train_seconds = 0;    // since the start of the run, earlier processes included
  double stall_seconds = 0;    // spent waiting for the loader
  EncodingTimes encoding_s{};  // of the batch
  int64_t batches_ready = 0;   // of the loader, when this step asked for one
  const StepResult* result = nullptr;
  std::vector<double> positions;  // (B) of the timesteps in the schedule, [0, 1]
  // Indices into those of the options: (B), of the batch.
  std::vector<int64_t> sources{};
  int64_t bucket = 0;
};

// The loss on held-out samples.
struct ValidationLoss {
  int64_t num_images = 0;
  double loss = 0;                    // of the objective, mean over the images
  std::array<double, 4> quartiles{};  // the same by quarter of the schedule, cleanest first; NaN: no image
};

class Monitor {
 public:
  // `from_step`: the checkpoint this process continues from; 0 for a fresh run.
  Monitor(const MonitorOptions& options, int64_t from_step);

  // To watch the step with; end_step() after each.
  PhaseTimers& timers() { return timers_; }

  // Collects; every log_every steps writes a line to the terminal, log.jsonl and TensorBoard. Losses of a
  // line are means over the steps since the line before. Where lines are far apart the terminal is told more
  // often that training goes on.
  void step(const StepReport& report);
  // A line of its own in log.jsonl: resume, skipped, checkpoint, ...
  void event(const nlohmann::json& line) { log_.append(line); }
  // Held-out samples' loss: a line on the terminal and in log.jsonl, and TensorBoard. Within pause() and
  // resume(). `weights`: whose.
  void validation(int64_t step, const ValidationLoss& loss, const std::string& weights);
  // Metrics of drawn pictures, {"metrics": ..., "protocol": ..., "stamp": ...}: likewise.
  void evaluation(int64_t step, const nlohmann::json& result);
  void image(const std::string& tag, const std::vector<uint8_t>& png, int64_t height, int64_t width,
             int64_t step);
  // Time that is not training (checkpoints, sample grids) does not count in images/s.
  void pause();
  void resume();

  // The steps collected since the last line, for a checkpoint between two lines: a resumed run logs the same
  // losses.
  nlohmann::json window() const;
  void restore_window(const nlohmann::json& window);

 private:
  using Clock = std::chrono::steady_clock;
  struct Window {
    int64_t steps = 0;  // with a finite loss
    double loss = 0;    // sum
    double quartile_loss[4] = {}, quartile_count[4] = {};
    LossGroups by_source, by_bucket;
    // Not saved: they describe this process.
    int64_t timed_steps = 0, batches_ready = 0;
    double stall_seconds = 0;
    EncodingTimes encoding_s{};
    int64_t num_readings = 0;
    std::vector<GpuReading> gpus{};  // sums
  };
  nlohmann::json measure(const StepReport& report);
  nlohmann::json phase_seconds();
  void add_gpu(nlohmann::json& line) const;
  void read_gpu();
  void print(const nlohmann::json& line, double train_seconds);
  std::string used_text(const nlohmann::json& line);
  void say_alive(const StepReport& report);
  std::string time_left_text(int64_t step, double train_seconds, const char* separator) const;
  void write_events(const nlohmann::json& line);

  MonitorOptions options_;
  RunLog log_;
  std::unique_ptr<EventWriter> events_;
  PhaseTimers timers_;
  std::vector<std::unique_ptr<Nvml>> gpus_;  // that the driver tells of; this rank's is the first
  Clock::time_point last_reading_{};
  Window window_;
  Clock::time_point window_begin_ = Clock::now(), pause_begin_{}, printed_at_ = Clock::now();
  int64_t first_step_;
  double first_train_seconds_ = -1;
  bool warned_of_memory_ = false;
};

}  // namespace kiln
