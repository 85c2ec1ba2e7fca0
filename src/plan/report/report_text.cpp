// A plan for the terminal.
#include <fmt/format.h>

#include "core/tensors.h"
#include "core/units.h"
#include "plan/report/report.h"
#include "plan/run/plan.h"

namespace kiln {

namespace {

std::string duration(double days) {
  const double seconds = days * 86400;
  if (seconds < 100) return fmt::format("{:.0f} s", seconds);
  if (seconds < 6000) return fmt::format("{:.0f} min", seconds / 60);
  if (days < 2) return fmt::format("{:.1f} h", days * 24);
  return fmt::format("{:.1f} days", days);
}

std::string money(const Plan& plan, double cost) { return cost_text(plan.options, cost, ", cost "); }

// Returns ", 240 kWh", or of less than ten ", 0.0056 kWh": a short run takes little, not nothing. Empty for
// 0, as of a CPU, whose watts are not known.
std::string amount(double value, const char* unit) {
  if (value == 0) return "";
  return fmt::format(", {} {}", value < 10 ? number_text(value, 2) : fmt::format("{:.0f}", value), unit);
}

std::string heading(const Plan& plan) {
  const TrainOptions& train = plan.options.train;
  std::string text =
      fmt::format("{}, {}, {} px, {} x {} {}, {}\n", train.model.name, weights_text(plan),
                  train.data.image_size, plan.data.channels, lanes_text(plan.data.lanes),
                  train.data.in_pixels() ? "pixels" : "latents", choice_name(train.compute.dtype));
  text += fmt::format("{} x {}: ", plan.options.gpus, plan.machine.name);
  text += fmt::format("{} images a step = {} of {}", train.global_batch, plan.rank_batch,
                      plan.options.gpus > 1 ? "each GPU" : "one device");
  if (plan.num_micro_steps > 1)
    text += fmt::format(", {} passes of {}", plan.num_micro_steps, plan.micro_batch);
  if (plan.options.gpus > 1)
    text += plan.options.train.zero.stage > 0 ? fmt::format(", ZeRO stage {}", plan.options.train.zero.stage)
                                              : ", data parallel";
  if (plan.options.train.offload.optimizer != Placement::kDevice)
    text += fmt::format(", optimizer on {}",
                        plan.options.train.offload.optimizer == Placement::kHost ? "the host" : "NVMe");
  if (plan.options.train.offload.params != Placement::kDevice)
    text += fmt::format(", weights on {}",
                        plan.options.train.offload.params == Placement::kHost ? "the host" : "NVMe");
  text += fmt::format("\nspeeds of the machine: {} ({})\n",
                      plan.machine.measured ? "measured" : "not measured", plan.machine.source);
  const std::string speed = describe(plan.machine.speed);
  return speed.empty() ? text : text + speed + "\n";
}

std::string verdict(const Plan& plan) {
  const int64_t spare = plan.machine.memory_bytes - plan.needed_bytes;
  const double share =
      static_cast<double>(plan.needed_bytes) / static_cast<double>(plan.machine.memory_bytes);
  return fmt::format("{}: {} of {} GiB needed ({:.0f} %), {} GiB {}; the most in: {}\n",
                     plan.fits ? "FITS" : "DOES NOT FIT", gib_text(plan.needed_bytes),
                     gib_text(plan.machine.memory_bytes), 100 * share, gib_text(std::abs(spare)),
                     spare >= 0 ? "to spare" : "too much", plan.needed_phase);
}

// Returns a line for the top if f32 takes much longer than half precision.
std::string precision(const Plan& plan) {
  constexpr double kMuchFaster = 1.5;
  if (plan.half_precision_speed < kMuchFaster) return "";
  return fmt::format("IN f32{} IT TAKES {:.1f} TIMES AS LONG AS IN HALF PRECISION: {}\n",
                     plan.options.train.compute.tf32 ? " (products in TF32)" : "", plan.half_precision_speed,
                     plan.options.change("compute-dtype", choice_name(half_dtype_of(plan.machine))));
}

std::string memory(const Plan& plan) {
  std::string text = "\nMemory of one device in the steady step, GiB\n";
  for (const auto& [kind, bytes] : plan.by_kind)
    text += fmt::format("  {:<24}{:>9}\n", kind, gib_text(bytes));
  text += fmt::format("  live at the peak        {:>9}  in {}{}\n", gib_text(plan.peak_bytes),
                      plan.peak_phase, plan.peak_segment.empty() ? "" : " of " + plan.peak_segment);
  for (const auto& [kind, bytes] : plan.overhead)
    text += fmt::format("  {:<24}{:>9}\n", kind, gib_text(bytes));
  text += "\nOptimizer state for all weights, GiB (docs/optimizers.md)\n";
  for (const auto& [name, bytes] : plan.optimizer_bytes)
    text += fmt::format("  {:<24}{:>9}{}\n", name, gib_text(bytes),
                        name == plan.options.train.optimizer.name ? "  planned" : "");
  text += "\nMemory by phase, GiB        device     host   pinned     NVMe\n";
  for (const PhasePlan& phase : plan.phases)
    text += fmt::format("  {:<22}{:>10}{:>9}{:>9}{:>9}\n", phase.name, gib_text(phase.bytes.device),
                        gib_text(phase.bytes.host), gib_text(phase.bytes.pinned_host),
                        gib_text(phase.bytes.nvme));
  return text;
}

// Returns how sure the time is, and what would make it surer.
std::string interval(const Plan& plan) {
  constexpr double kMostMissing = 0.1;
  std::string text =
      fmt::format(" expected between {} and {} s; measured in exact shapes: {:.0f} % of the time",
                  number_text(plan.step_s / (1 + plan.time_error), 3),
                  number_text(plan.step_s * (1 + plan.time_error), 3), 100 * plan.measured_share);
  // Only this machine can be measured now.
  if (plan.machine.device == DryRunDevice::kCpu && plan.measured_share < 1 - kMostMissing)
    text += " (--device cpu --measure-seconds 20 measures the rest)";
  return text + "\n ";
}

std::string lane_speeds(const Plan& plan) {
  if (plan.lane_speeds.empty()) return "";
  std::string text = "  the time above is of a lane of mean area; of each lane   step s   images/s\n";
  for (const LaneSpeed& speed : plan.lane_speeds)
    text += fmt::format("  {:>52}{:>9}{:>11}\n", fmt::format("{} x {}", speed.lane.height, speed.lane.width),
                        number_text(speed.step_s, 3), number_text(speed.images_per_s));
  return text;
}

std::string shares(const PeakShare& share) {
  if (!share.problem.empty()) return "\n  " + share.problem;
  const std::string mfu = share.mfu > 0 ? fmt::format(", MFU {:.0f} %", 100 * share.mfu) : "";
  return share.of_profile > 0 ? fmt::format(", {:.0f} % of peak{}", 100 * share.of_profile, mfu) : "";
}

std::string time(const Plan& plan) {
  std::string text = fmt::format("\nTime: {} s a step, {} images/s{}\n ", number_text(plan.step_s, 3),
                                 number_text(plan.images_per_s), shares(plan.peak_share));
  if (plan.time_error > 0) text += interval(plan);
  for (size_t i = 0; i < plan.phase_s.size(); ++i)
    if (plan.phase_s[i] >= 0.005 * plan.step_s)
      text += fmt::format(" {} {:.0f} %", name_of(static_cast<StepPhase>(i)),
                          100 * plan.phase_s[i] / plan.step_s);
  if (const double pictures = plan.encoding_s - plan.caption_encoding_s; pictures > 0)
    text += fmt::format(" encoding pictures {:.0f} %", 100 * pictures / plan.step_s);
  if (plan.caption_encoding_s > 0)
    text += fmt::format(" encoding captions {:.0f} %", 100 * plan.caption_encoding_s / plan.step_s);
  text += "\n";
  if (!plan.attention.empty()) text += fmt::format("  attention by torch's {} kernels\n", plan.attention);
  text += lane_speeds(plan);
  text += fmt::format("  {} steps: {}{}{}{}\n", plan.steps, duration(plan.days),
                      amount(plan.gpu_hours, "GPU hours"), amount(plan.kilowatt_hours, "kWh"),
                      money(plan, plan.cost));
  for (const Milestone& milestone : plan.milestones)
    text += fmt::format("  {} ({} steps): {}{}\n", milestone.name, milestone.steps, duration(milestone.days),
                        money(plan, milestone.cost));
  for (const MeasuredSpeed& run : plan.measured)
    text += fmt::format(
        "  measured by others: {}, {} x {}, {} images a step, {}: {:.2f} steps/s; planned like that: {:.2f}, "
        "{:.1f} times as fast\n",
        run.source, run.gpus, plan.machine.name, run.global_batch, run.options, run.steps_per_s,
        run.planned_steps_per_s, run.planned_steps_per_s / run.steps_per_s);
  if (!shows_scaling(plan)) return text;
  text += "\nThe same images per GPU   step s   images/s  efficiency       time\n";
  for (const ScalingPoint& point : plan.scaling)
    text += fmt::format("  {:>5} {:<15}{:>9}{:>11}{:>10.0f} %{:>12}{}\n", point.gpus,
                        point.gpus == 1 ? "device" : "devices", number_text(point.step_s, 3),
                        number_text(point.images_per_s), 100 * point.efficiency, duration(point.days),
                        money(plan, point.cost));
  if (plan.machine.network_bytes_per_s > 0)
    text += fmt::format("  nodes of {} GPUs, {} GB/s from node to node (--gpus-per-node, --network-gbit)\n",
                        plan.machine.gpus_per_node, number_text(plan.machine.network_bytes_per_s / 1e9, 3));
  return text;
}

std::string disk(const Plan& plan) {
  std::string text =
      fmt::format("\nDisk: {}; checkpoint {} GiB, {} kept {} GiB\n", samples_text(plan.samples),
                  gib_text(plan.checkpoint_bytes), plan.num_checkpoints,
                  gib_text(plan.checkpoint_bytes * plan.num_checkpoints));
  return text + "  " + rate_text(plan) + "\n";
}

std::string text_list(const char* title, const std::vector<std::string>& lines) {
  if (lines.empty()) return "";
  std::string text = fmt::format("\n{}\n", title);
  for (const std::string& line : lines) text += "  - " + line + "\n";
  return text;
}

}  // namespace

std::string to_text(const Plan& plan) {
  return heading(plan) + verdict(plan) + precision(plan) + memory(plan) + time(plan) + disk(plan) +
         text_list("Advice", plan.advice) + text_list("Not in this plan", plan.notes);
}

}  // namespace kiln
