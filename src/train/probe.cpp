#include "train/probe.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <optional>

#include "core/error.h"
#include "core/files/atomic_file.h"
#include "core/files/temporary_folder.h"
#include "parallel/machine.h"
#include "parallel/ranks/agreement.h"
#include "train/checkpoint_files.h"
#include "train/dataset/store_data.h"
#include "train/loop.h"
#include "watch/phase_timers.h"
#include "watch/precision_audit.h"
#include "watch/prediction.h"
#include "watch/report.h"

namespace kiln {

namespace fs = std::filesystem;

namespace {

constexpr double kMemoryWarning = 0.85;  // of the device's memory
constexpr int64_t kLeastAuditSteps = 3;
constexpr double kEncodingWarning = 0.1;  // of the time

// Throws Error if the folder has no room for the checkpoint, which ends the run so that this phase is
// measured too.
void check_disk(const nlohmann::json& predicted, const fs::path& folder) {
  const auto bytes = predicted.is_object() ? predicted.value("checkpoint_bytes", int64_t{0}) : 0;
  const int64_t available = available_bytes(folder.string());
  if (available < bytes)
    fail("probe", "{} has {} free and a checkpoint takes {}: set TMPDIR to a folder with more",
         folder.string(), size_text(static_cast<double>(available)), size_text(static_cast<double>(bytes)));
}

// Returns a validation of one pass at the end, which shows its memory. The samples that it holds out are held
// out of the probe's training too.
ValidationOptions short_validation(const TrainOptions& options) {
  ValidationOptions validation = options.validation;
  if (!validation.is_on()) return validation;
  validation.every = 0;
  validation.images = std::min(validation_samples(options), options.global_batch);
  return validation;
}

TrainOptions short_run(const ProbeOptions& options, const fs::path& folder) {
  if (options.steps < 1) fail("probe", "--steps expects a positive number, got {}", options.steps);
  if (options.audits_precision && options.steps < kLeastAuditSteps)
    fail("probe", "--audit-precision audits a step after the warm-up: --steps expects {} or more, got {}",
         kLeastAuditSteps, options.steps);
  if (!options.train.watch.profile.empty())
    fail("probe", "--profile has no effect in a probe, whose run folder is removed: use it with kiln train");
  TrainOptions run = options.train;
  run.out = (folder / "run").string();
  run.max_steps = options.steps;
  run.max_minutes = 0;
  run.checkpoints.every = run.samples.every = run.evaluation.every = 0;
  run.validation = short_validation(options.train);
  run.watch.tensorboard = false;
  run.memory.preflight = false;  // the caller has planned
  return run;
}

// Returns the share of a steady step's time that goes into encoding.
double encoding_share(const StepFigures& measured) {
  return measured.step_s > 0 ? encoding_seconds(measured.phase_s) / measured.step_s : 0;
}

// Returns what is encoded: "pictures", "captions" or both.
std::string encoded_text(const StepFigures& measured) {
  const bool pictures = measured.phase_s.contains(kEncodingPhases[0]);
  if (!measured.phase_s.contains(kEncodingPhases[1])) return "pictures";
  return pictures ? "pictures and captions" : "captions";
}

std::vector<std::string> warnings_of(const StepFigures& measured, const nlohmann::json& predicted,
                                     int64_t memory_bytes) {
  std::vector<std::string> warnings;
  int64_t used = measured.peak_bytes;
  if (predicted.contains("overhead"))  // other things than tensors on the device
    for (const auto& [name, bytes] : predicted.at("overhead").items()) used += bytes.get<int64_t>();
  const double share = memory_bytes > 0 ? static_cast<double>(used) / static_cast<double>(memory_bytes) : 0;
  if (share > kMemoryWarning)
    warnings.push_back(fmt::format(
        "{:.0f} % of the device's memory are in use ({} of {}): take smaller passes (--micro-batch, or its "
        "key in a DeepSpeed file), or give --memory-budget auto",
        100 * share, size_text(static_cast<double>(used)), size_text(static_cast<double>(memory_bytes))));
  if (const double share = encoding_share(measured); share > kEncodingWarning)
    warnings.push_back(
        fmt::format("encoding {} takes {:.0f} % of the time: kiln extract does it once for all epochs, and "
                    "--data is then its store",
                    encoded_text(measured), 100 * share));
  return warnings;
}

// Returns the planned phases that a probe leaves out and that are therefore not measured.
std::vector<std::string> phases_not_run(const nlohmann::json& predicted, const StepFigures& measured) {
  std::vector<std::string> names;
  if (!predicted.is_null())
    for (const auto& [phase, bytes] : figures_from_json(predicted).by_phase)
      if (!measured.by_phase.contains(phase)) names.push_back(phase);
  return names;
}

nlohmann::json extrapolated(const TrainOptions& options, const StepFigures& measured, int64_t world_size) {
  double seconds = static_cast<double>(options.max_steps) * measured.step_s;
  if (options.max_minutes > 0) seconds = std::min(seconds, options.max_minutes * 60);
  return {{"steps", measured.step_s > 0 ? static_cast<int64_t>(std::llround(seconds / measured.step_s)) : 0},
          {"days", seconds / 86400},
          {"cost", cost_per_hour_of(options.watch, world_size) * seconds / 3600}};
}

std::string row(const ComparedFigure& figure, bool with_prediction) {
  const double error = figure.relative_error();
  return fmt::format("  {:<24}{:>12}{:>12}{:>10}\n", figure.name,
                     with_prediction ? text_of(figure, figure.predicted) : "",
                     text_of(figure, figure.measured),
                     with_prediction && std::isfinite(error) ? fmt::format("{:+.1f} %", 100 * error) : "");
}

// Returns ", 47 % of the data sheet", or "" if there is no such figure.
std::string share_text(const nlohmann::json& figures, const char* key, const char* of_what) {
  return figures.contains(key) ? fmt::format(", {:.0f} % {}", 100 * figures.at(key).get<double>(), of_what)
                               : "";
}

// Returns a line for attention, and one for the products with an epilogue that were asked for.
std::string choices_text(const nlohmann::json& gpu) {
  std::string text =
      fmt::format("attention: {}\n", fmt::join(gpu.at("attention").get<std::vector<std::string>>(), ", "));
  std::vector<std::string> products;
  for (const auto& [name, counts] : gpu.at("epilogues").items()) {
    const auto served = counts.at("served").get<int64_t>(), refused = counts.at("refused").get<int64_t>();
    if (served + refused > 0) products.push_back(fmt::format("{} {} of {}", name, served, served + refused));
  }
  if (!products.empty())
    text += fmt::format("served by cuBLASLt's epilogues: {}\n", fmt::join(products, ", "));
  return text;
}

}  // namespace

nlohmann::json probe(const ProbeOptions& options) {
  ProcessGroup& group = *options.group;
  std::optional<TemporaryFolder> folder;
  if (group.rank() == 0) folder.emplace("probe");
  const std::string own_path = folder ? folder->path().string() : std::string();
  const fs::path path = group.gather(own_path, "the folder of the probe").front();
  agree(group, "the folder of the probe", [&] {
    if (!fs::is_directory(path))
      fail("probe",
           "the ranks share no temporary folder ({} is not here): set TMPDIR to one on a shared file system",
           path.string());
  });
  const TrainOptions run = short_run(options, path);
  if (folder && options.checkpoint) as_rank(group, [&] { check_disk(options.predicted, path); });
  std::vector<OpRecord> operations;
  const auto take_operations = [&](std::vector<OpRecord> timed) { operations = std::move(timed); };
  train(run, {.predicted = options.predicted,
              .data_sheet_flops = options.data_sheet_flops,
              .audits_precision = options.audits_precision,
              .on_timed_operations = take_operations,
              .saves_the_end = options.checkpoint,
              .group = options.group});
  if (!folder) return nullptr;
  std::ifstream file(run.out + "/plan.json");
  if (!file) fail("probe", "stopped before the first step was done");
  nlohmann::json result = nlohmann::json::parse(file);
  const StepFigures measured = figures_from_json(result.at("measured"));
  result["not_run"] = phases_not_run(options.predicted, measured);
  result["warnings"] = warnings_of(measured, options.predicted, options.memory_bytes);
  result["extrapolated"] = extrapolated(options.train, measured, group.world_size());
  if (std::ifstream audit(run.out + "/precision.json"); audit)
    result["precision"] = nlohmann::json::parse(audit);
  if (!options.ideal.empty()) {
    const at::Device device = choose_device(run.compute.device, group.ranks().local_rank);
    result["bound"] = bound_json(options.ideal, measure_rates(device, run.compute.held_dtype()), operations,
                                 measured.step_s);
    write_file_atomically("plan", run.out + "/plan.json", result.dump(1) + "\n");
  }
  if (!options.report.empty()) {
    write_report(run.out);
    std::error_code error;
    fs::copy_file(run.out + "/report.html", options.report, fs::copy_options::overwrite_existing, error);
    if (error) fail("probe", "--report {} cannot be written: {}", options.report, error.message());
  }
  return result;
}

std::string probe_text(const nlohmann::json& result) {
  const StepFigures measured = figures_from_json(result.at("measured"));
  const bool planned = !result.at("predicted").is_null();
  const StepFigures predicted = planned ? figures_from_json(result.at("predicted")) : measured;
  std::string text = fmt::format("\n  {:<24}{:>12}{:>12}\n", "", planned ? "predicted" : "", "measured");
  for (const ComparedFigure& figure : compare(predicted, measured)) text += row(figure, planned);
  const auto not_run = result.at("not_run").get<std::vector<std::string>>();
  if (!not_run.empty()) text += fmt::format("not run by a probe: {}\n", fmt::join(not_run, ", "));
  const auto& quartiles = measured.step_s_quartiles;
  const bool is_one = measured.num_steps == 1;
  text += fmt::format("\n{} steady step{}: {:.3f} steps/s", measured.num_steps, is_one ? "" : "s",
                      1 / quartiles.at(1));
  if (!is_one)
    text +=
        fmt::format(" (half of them between {:.3f} and {:.3f})", 1 / quartiles.at(2), 1 / quartiles.at(0));
  text += fmt::format(", {:.1f} images/s\nwaiting for data: {:.1f} % of the time\n", measured.images_per_s,
                      100 * measured.stall_share);
  if (const double share = encoding_share(measured); share > 0)
    text += fmt::format("encoding {}: {:.1f} % of the time\n", encoded_text(measured), 100 * share);
  const nlohmann::json& figures = result.at("measured");
  if (figures.contains("tflops"))
    text += fmt::format("{:.4g} TFLOP/s{}{}\n", figures.at("tflops").get<double>(),
                        share_text(figures, "peak_share", "of the measured product"),
                        share_text(figures, "mfu", "of the data sheet (MFU)"));
  if (result.contains("bound")) text += bound_text(result.at("bound"));
  const auto& whole = result.at("extrapolated");
  const double cost = whole.at("cost");
  text += fmt::format("the whole run of {} steps: {:.2f} days{}\n", whole.at("steps").get<int64_t>(),
                      whole.at("days").get<double>(), cost > 0 ? fmt::format(", cost {:.2f}", cost) : "");
  for (const auto& finding : result.at("findings"))
    text += fmt::format("finding: {}\n", finding.get<std::string>());
  for (const auto& warning : result.at("warnings"))
    text += fmt::format("warning: {}\n", warning.get<std::string>());
  if (result.contains("gpu")) text += choices_text(result.at("gpu"));
  if (result.contains("precision")) text += precision_text(result.at("precision"));
  for (const auto& advice : result.value("advice", nlohmann::json::array()))
    text += fmt::format("advice: {}: {}\n", advice.at("about").get<std::string>(),
                        advice.at("text").get<std::string>());
  return text;
}

}  // namespace kiln
