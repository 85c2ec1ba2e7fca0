#include "watch/monitor.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/error.h"
#include "core/units.h"
#include "parallel/machine.h"

namespace kiln {

namespace {

constexpr const char *kEvents = "TensorBoard's events", *kLog = "lines of log.jsonl";

double gigabytes(double bytes) { return bytes / 1e9; }

// "forward 33% backward 58% optimizer 8% data 1%": shares of the step. Leaves out shares below half a
// percent.
std::string phase_text(const nlohmann::json& phases) {
  double total = 0;
  for (const auto& [name, seconds] : phases.items()) total += seconds.get<double>();
  std::string text;
  for (const PhaseGroup& group : phase_groups())
    if (const double percent = 100 * group.seconds(phases) / total; percent >= 0.5)
      text += fmt::format("{}{} {:.0f}%", text.empty() ? "" : " ", group.name, percent);
  return text;
}

std::string loss_text(double loss) {
  return std::isfinite(loss) ? fmt::format("{:.5f}", loss) : "not finite";
}

// Returns " (another 40%)" if one of the other GPUs is much less busy than this one, else "".
std::string least_busy_text(const nlohmann::json& line) {
  constexpr double kMuchLess = 0.1;
  if (!line.contains("gpus") || !line.contains("gpu_utilisation")) return "";
  const double own = line["gpu_utilisation"];
  double least = own;
  for (const nlohmann::json& gpu : line["gpus"]) least = std::min(least, gpu.value("utilisation", own));
  return least < own - kMuchLess ? fmt::format(" (another {:.0f}%)", 100 * least) : "";
}

void add(std::optional<double>& sum, std::optional<double> value) {
  if (value) sum = sum.value_or(0) + *value;
}

}  // namespace

Monitor::Monitor(const MonitorOptions& options, int64_t from_step)
    : options_(options), timers_(options.device), first_step_(from_step) {
  by_products_.try_to_write(kLog, [&] { open_log(); });  // cuts what a resume goes over again
  const int first = options.device.is_cuda() ? options.device.index() : 0;
  for (int64_t gpu = 0; gpu < std::max<int64_t>(1, options.num_gpus); ++gpu) {
    auto nvml = Nvml::open(first + static_cast<int>(gpu));
    if (!nvml) break;
    gpus_.push_back(std::move(nvml));
  }
  if (options.tensorboard)
    by_products_.try_to_write(kEvents,
                              [&] { events_ = std::make_unique<EventWriter>(options.run, from_step + 1); });
}

void Monitor::open_log() {
  if (!log_) log_ = std::make_unique<RunLog>(options_.run, first_step_);
}

void Monitor::log(const nlohmann::json& line) {
  by_products_.try_to_write(kLog, [&] {
    open_log();
    log_->append(line);
  });
}

// After an error the file may end within a record, and TensorBoard would read nothing behind it.
void Monitor::tell_tensorboard(const std::function<void(EventWriter& events)>& tell) {
  if (!events_) return;
  const bool is_written = by_products_.try_to_write(kEvents, [&] {
    tell(*events_);
    events_->flush();
  });
  if (!is_written) events_.reset();
}

void Monitor::step(const StepReport& report) {
  const StepResult& result = *report.result;
  if (first_train_seconds_ < 0) first_train_seconds_ = report.train_seconds;
  ++window_.timed_steps;
  window_.stall_seconds += report.stall_seconds;
  for (size_t i = 0; i < report.encoding_s.size(); ++i) window_.encoding_s[i] += report.encoding_s[i];
  window_.batches_ready += report.batches_ready;
  window_.flops += report.flops;
  read_gpu();
  if (std::isfinite(result.loss)) {
    ++window_.steps;
    window_.loss += result.loss;
    if (options_.terms.size() > 1)  // one alone says what the loss says
      for (size_t i = 0; i < options_.terms.size(); ++i)
        window_.by_term.add(options_.terms[i], result.terms.at(i));
  }
  for (size_t i = 0; i < result.losses.size(); ++i) {
    if (!std::isfinite(result.losses[i])) continue;
    const int quartile = std::clamp(static_cast<int>(report.positions[i] * 4), 0, 3);
    window_.quartile_loss[quartile] += result.losses[i];
    window_.quartile_count[quartile] += 1;
    if (!options_.sources.empty())
      window_.by_source.add(options_.sources.at(static_cast<size_t>(report.sources.at(i))), result.losses[i]);
    if (!options_.buckets.empty())
      window_.by_bucket.add(options_.buckets.at(static_cast<size_t>(report.bucket)), result.losses[i]);
  }
  const bool is_due = report.step % options_.log_every == 0;
  if (!is_due && !report.is_last) return say_alive(report);
  const nlohmann::json line = measure(report);
  log(line);
  print(line, report.train_seconds);
  tell_tensorboard([&](EventWriter& events) { add_scalars(events, line); });
  if (!is_due) return;  // a longer run goes on with this window, as if it had not ended here
  window_ = {};
  window_begin_ = Clock::now();
  window_times_ = processor_times();
}

nlohmann::json Monitor::measure(const StepReport& report) {
  const double seconds = std::chrono::duration<double>(Clock::now() - window_begin_).count();
  const double images_per_s = static_cast<double>(window_.timed_steps * options_.global_batch) / seconds;
  const double flops = window_.flops / seconds;
  // A machine that was busy when its peak was measured may do better later.
  if (options_.peak_flops > 0) options_.peak_flops = std::max(options_.peak_flops, flops);
  nlohmann::json quartiles = nlohmann::json::array();
  for (int i = 0; i < 4; ++i)
    quartiles.push_back(window_.quartile_count[i] > 0
                            ? nlohmann::json(window_.quartile_loss[i] / window_.quartile_count[i])
                            : nlohmann::json());
  nlohmann::json line = {
      {"step", report.step},
      {"images_seen", report.images_seen},
      {"loss", window_.steps > 0 ? nlohmann::json(window_.loss / static_cast<double>(window_.steps))
                                 : nlohmann::json()},
      {"loss_quartiles", quartiles},
      {"lr", report.lr},
      {"grad_norm", report.result->grad_norm},
      {"images_per_s", images_per_s},
      {"tflops", flops / 1e12},
      {"peak_share", options_.peak_flops > 0 ? flops / options_.peak_flops : 0},
      {"stall_share", window_.stall_seconds / seconds},
      {"queue_depth", static_cast<double>(window_.batches_ready) / static_cast<double>(window_.timed_steps)},
      {"phase_s", phase_seconds()},
      {"host_bytes", resident_bytes()},
      {"peak_host_bytes", peak_resident_bytes()},
      {"device_bytes", device_bytes(options_.device)},
      {"peak_device_bytes", peak_device_bytes(options_.device)},
      {"train_seconds", report.train_seconds}};
  if (!window_.by_term.empty()) line["loss_by_term"] = window_.by_term.means();
  if (!window_.by_source.empty()) line["loss_by_source"] = window_.by_source.means();
  if (!window_.by_bucket.empty()) line["loss_by_bucket"] = window_.by_bucket.means();
  if (options_.sheet_flops > 0) line["mfu"] = flops / options_.sheet_flops;
  if (report.result->loss_scale != 1) line["loss_scale"] = report.result->loss_scale;
  add_gpu(line);
  if (options_.device.is_cpu()) add_taken(line);
  return line;
}

// Adds the share of the processors' time that other programs had. Says once that it is much, of an interval
// that is long enough to tell.
void Monitor::add_taken(nlohmann::json& line) {
  constexpr double kLongEnough = 1;  // seconds
  const ProcessorTimes spent = processor_times().since(window_times_);
  const double share = taken_share(spent, processors_of(at::get_num_threads()));
  line["taken_share"] = share;
  const std::string taken = taken_text(share);
  if (taken.empty() || spent.wall < kLongEnough || std::exchange(told_of_others_, true)) return;
  fmt::print("note: up to step {} {}: steps take longer than without them\n", line["step"].get<int64_t>(),
             taken);
}

// Returns means per step of the window.
nlohmann::json Monitor::phase_seconds() {
  const double steps = static_cast<double>(window_.timed_steps);
  const PhaseSeconds seconds = timers_.take();
  nlohmann::json phases = {{"data", window_.stall_seconds / steps}};
  for (size_t i = 0; i < window_.encoding_s.size(); ++i)
    if (window_.encoding_s[i] > 0) phases[kEncodingPhases[i]] = window_.encoding_s[i] / steps;
  for (size_t i = 0; i < seconds.size(); ++i)
    phases[std::string(name_of(static_cast<StepPhase>(i)))] = seconds[i] / steps;
  return phases;
}

// Reads the GPUs at least once per line of the log, otherwise at most once a second: the driver's own
// averages are no finer.
void Monitor::read_gpu() {
  const bool recent = Clock::now() - last_reading_ < std::chrono::seconds(1);
  if (gpus_.empty() || (window_.num_readings > 0 && recent)) return;
  last_reading_ = Clock::now();
  window_.gpus.resize(gpus_.size());
  ++window_.num_readings;
  for (size_t i = 0; i < gpus_.size(); ++i) {
    const GpuReading now = gpus_[i]->read();
    GpuReading& sum = window_.gpus[i];
    add(sum.utilisation, now.utilisation);
    add(sum.watts, now.watts);
    sum.memory_bytes = now.memory_bytes;
    sum.memory_total_bytes = now.memory_total_bytes;
  }
}

// Adds the values of this rank's GPU as "gpu_...". With several GPUs, also lists the values of all.
void Monitor::add_gpu(nlohmann::json& line) const {
  const double readings = static_cast<double>(window_.num_readings);
  const auto told = [&](const GpuReading& sum, const std::string& prefix) {
    nlohmann::json values = nlohmann::json::object();
    if (sum.utilisation) values[prefix + "utilisation"] = *sum.utilisation / readings;
    if (sum.watts) values[prefix + "watts"] = *sum.watts / readings;
    if (sum.memory_bytes) values[prefix + "memory_bytes"] = *sum.memory_bytes;
    if (sum.memory_total_bytes) values[prefix + "memory_total_bytes"] = *sum.memory_total_bytes;
    return values;
  };
  if (window_.gpus.empty()) return;
  line.update(told(window_.gpus.front(), "gpu_"));
  if (window_.gpus.size() > 1)
    for (const GpuReading& sum : window_.gpus) line["gpus"].push_back(told(sum, ""));
}

// Prints a sign of life if two lines of the log are far apart.
void Monitor::say_alive(const StepReport& report) {
  const Clock::time_point now = Clock::now();
  if (std::chrono::duration<double>(now - printed_at_).count() < options_.quiet_seconds) return;
  printed_at_ = now;
  const double seconds = std::chrono::duration<double>(printed_at_ - window_begin_).count();
  const double images = static_cast<double>(window_.timed_steps * options_.global_batch);
  fmt::print("at step {}: loss {}, {:.1f} images/s{} (a line of the log every {} steps: --log-every)\n",
             report.step, loss_text(report.result->loss), images / seconds,
             time_left_text(report.step, report.train_seconds, ", "), options_.log_every);
  std::fflush(stdout);
}

// Returns `separator` and "2h 05m left". Empty for the first step of a process: nothing is timed yet.
std::string Monitor::time_left_text(int64_t step, double train_seconds, const char* separator) const {
  if (step <= first_step_ + 1) return "";
  const double seconds_per_step =
      (train_seconds - first_train_seconds_) / static_cast<double>(step - first_step_ - 1);
  double left = (static_cast<double>(options_.max_steps - step) + options_.steps_ahead) * seconds_per_step;
  if (options_.max_seconds > 0) left = std::min(left, std::max(0.0, options_.max_seconds - train_seconds));
  return fmt::format("{}{} left", separator, duration_text(left));
}

// Returns " (20.1 of 24.0 GB used, 84%)". Warns once if that is much.
std::string Monitor::used_text(const nlohmann::json& line) {
  constexpr double kMuchMemory = 0.85;
  const double used = line["gpu_memory_bytes"], total = line.value("gpu_memory_total_bytes", 0.0);
  if (total <= 0) return fmt::format(" ({:.1f} GB used)", gigabytes(used));
  if (used > kMuchMemory * total && !std::exchange(warned_of_memory_, true))
    fmt::print(stderr,
               "warning: {:.0f} % of the card's memory ({:.1f} of {:.1f} GB) is in use, which leaves little "
               "for other programs and fragmentation: lower --memory-budget or --micro-batch, or its key in "
               "a DeepSpeed file\n",
               100 * used / total, gigabytes(used), gigabytes(total));
  return fmt::format(" ({:.1f} of {:.1f} GB used, {:.0f}%)", gigabytes(used), gigabytes(total),
                     100 * used / total);
}

void Monitor::print(const nlohmann::json& line, double train_seconds) {
  const int64_t step = line["step"];
  std::string device;
  if (options_.device.is_cuda()) {
    device = fmt::format(" + {:.1f} GB GPU", gigabytes(line["device_bytes"]));
    if (line.contains("gpu_memory_bytes"))  // the driver's count includes the context and other programs
      device += used_text(line);
    if (line.contains("gpu_utilisation"))
      device += fmt::format(" {:.0f}% busy", 100 * line["gpu_utilisation"].get<double>());
    device += least_busy_text(line);
    if (line.contains("gpu_watts")) device += fmt::format(" {:.0f} W", line["gpu_watts"].get<double>());
  }
  const std::string mfu =
      line.contains("mfu") ? fmt::format(", MFU {:.0f}%", 100 * line["mfu"].get<double>()) : "";
  const std::string loss = loss_text(line["loss"].is_null() ? NAN : line["loss"].get<double>());
  fmt::print(
      "step {:>7}  images {:>9}  loss {}  lr {:.3g}  grad {:.3f}  {:.1f} images/s  {} TFLOP/s "
      "({:.0f}%{})  "
      "{:.1f} GB{}  {}  ready {:.1f}{}\n",
      step, line["images_seen"].get<int64_t>(), loss, line["lr"].get<double>(),
      line["grad_norm"].get<double>(), line["images_per_s"].get<double>(),
      number_text(line["tflops"].get<double>(), 3), 100 * line["peak_share"].get<double>(), mfu,
      gigabytes(line["host_bytes"]), device, phase_text(line["phase_s"]), line["queue_depth"].get<double>(),
      time_left_text(step, train_seconds, "  "));
  std::fflush(stdout);
  printed_at_ = Clock::now();
}

void Monitor::add_scalars(EventWriter& events, const nlohmann::json& line) {
  const int64_t step = line["step"];
  for (const char* tag : {"loss", "lr", "grad_norm", "images_per_s", "tflops", "peak_share", "mfu",
                          "stall_share", "queue_depth", "host_bytes", "device_bytes", "loss_scale",
                          "gpu_utilisation", "gpu_watts", "gpu_memory_bytes"})
    if (line.contains(tag) && line[tag].is_number()) events.add_scalar(tag, line[tag], step);
  if (line.contains("gpus"))
    for (size_t i = 0; i < line["gpus"].size(); ++i)
      for (const auto& [name, value] : line["gpus"][i].items())
        if (name != "memory_total_bytes") events.add_scalar(fmt::format("gpu_{}/{}", i, name), value, step);
  for (const auto& [phase, seconds] : line["phase_s"].items())
    events.add_scalar("phase_s/" + phase, seconds, step);
  for (const char* groups : {"loss_by_term", "loss_by_source", "loss_by_bucket"})
    if (line.contains(groups))
      for (const auto& [name, loss] : line[groups].items())
        events.add_scalar(fmt::format("{}/{}", groups, name), loss, step);
  for (int i = 0; i < 4; ++i)
    if (line["loss_quartiles"][i].is_number())
      events.add_scalar(fmt::format("loss_by_timestep/quartile_{}", i + 1), line["loss_quartiles"][i], step);
}

void Monitor::image(const std::string& tag, const std::vector<uint8_t>& png, int64_t height, int64_t width,
                    int64_t step) {
  tell_tensorboard([&](EventWriter& events) { events.add_image(tag, png, height, width, step); });
}

void Monitor::validation(int64_t step, const ValidationLoss& loss, const std::string& weights) {
  const auto number = [](double value) {
    return std::isfinite(value) ? nlohmann::json(value) : nlohmann::json();
  };
  const double seconds = std::chrono::duration<double>(Clock::now() - pause_begin_).count();
  nlohmann::json line = {{"event", "validation"},
                         {"step", step},
                         {"images", loss.num_images},
                         {"weights", weights},
                         {"validation_loss", number(loss.loss)},
                         {"validation_loss_quartiles", nlohmann::json::array()},
                         {"seconds", seconds}};
  for (const double quartile : loss.quartiles) line["validation_loss_quartiles"].push_back(number(quartile));
  log(line);
  fmt::print("step {:>7}  validation loss {}  {} images with {} in {:.1f} s\n", step, loss_text(loss.loss),
             loss.num_images, weights, seconds);
  std::fflush(stdout);
  tell_tensorboard([&](EventWriter& events) {
    if (std::isfinite(loss.loss)) events.add_scalar("validation_loss", loss.loss, step);
    for (size_t q = 0; q < loss.quartiles.size(); ++q)
      if (std::isfinite(loss.quartiles[q]))
        events.add_scalar(fmt::format("validation_loss_by_timestep/quartile_{}", q + 1), loss.quartiles[q],
                          step);
  });
}

void Monitor::evaluation(int64_t step, const nlohmann::json& result) {
  const double seconds = std::chrono::duration<double>(Clock::now() - pause_begin_).count();
  nlohmann::json line = result;
  line["event"] = "evaluation";
  line["step"] = step;
  line["seconds"] = seconds;
  log(line);
  std::string text;
  for (const auto& [name, value] : result.at("metrics").items())
    if (value.is_number()) text += fmt::format("  {} {:.5g}", name, value.get<double>());
  fmt::print("step {:>7}{}  in {:.1f} s\n", step, text, seconds);
  std::fflush(stdout);
  tell_tensorboard([&](EventWriter& events) {
    for (const auto& [name, value] : result.at("metrics").items())
      if (value.is_number()) events.add_scalar("evaluation/" + name, value.get<double>(), step);
  });
}

void Monitor::pause() {
  pause_begin_ = Clock::now();
  pause_times_ = processor_times();
}

void Monitor::resume() {
  window_begin_ += Clock::now() - pause_begin_;
  window_times_ = processor_times().since(pause_times_.since(window_times_));
}

nlohmann::json Monitor::window() const {
  nlohmann::json window = {{"steps", window_.steps},
                           {"loss", window_.loss},
                           {"quartile_loss", window_.quartile_loss},
                           {"quartile_count", window_.quartile_count}};
  if (!window_.by_term.empty()) window["by_term"] = window_.by_term.sums();
  if (!window_.by_source.empty()) window["by_source"] = window_.by_source.sums();
  if (!window_.by_bucket.empty()) window["by_bucket"] = window_.by_bucket.sums();
  return window;
}

void Monitor::restore_window(const nlohmann::json& window) {
  if (!window.is_object()) return;
  window_.steps = window.at("steps");
  window_.loss = window.at("loss");
  for (size_t i = 0; i < 4; ++i) {
    window_.quartile_loss[i] = window.at("quartile_loss").at(i);
    window_.quartile_count[i] = window.at("quartile_count").at(i);
  }
  window_.by_term = LossGroups(window.value("by_term", nlohmann::json::object()));
  window_.by_source = LossGroups(window.value("by_source", nlohmann::json::object()));
  window_.by_bucket = LossGroups(window.value("by_bucket", nlohmann::json::object()));
}

}  // namespace kiln
