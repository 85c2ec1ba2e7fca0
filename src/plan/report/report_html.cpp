// A plan as a page.
#include <fmt/format.h>

#include <cmath>

#include "core/tensors.h"
#include "core/units.h"
#include "plan/report/report.h"
#include "plan/run/plan.h"
#include "watch/report_parts.h"

namespace kiln {

namespace {

using Rows = std::vector<std::vector<std::string>>;

void add_memory(Page& page, const Plan& plan) {
  Rows kinds, phases;
  for (const auto* map : {&plan.by_kind, &plan.overhead})
    for (const auto& [kind, bytes] : *map) kinds.push_back({kind, gib_text(bytes)});
  for (const PhasePlan& phase : plan.phases)
    phases.push_back({phase.name, gib_text(phase.bytes.device), gib_text(phase.bytes.host),
                      gib_text(phase.bytes.pinned_host), gib_text(phase.bytes.nvme)});
  page.section("Memory of one device, GiB");
  add_memory_plot(page, plan.curve);
  page.table({"at the peak of a step", "GiB"}, kinds);
  page.section("By phase, GiB");
  page.table({"phase", "device", "host", "pinned host", "NVMe"}, phases);
}

std::string time_text(double days) { return duration_text(days * kSecondsPerDay); }

void add_times(Page& page, const Plan& plan) {
  Rows phases, milestones;
  for (size_t i = 0; i < plan.phase_s.size(); ++i)
    if (plan.phase_s[i] > 0)
      phases.push_back({std::string(name_of(static_cast<StepPhase>(i))),
                        number_text(1e3 * plan.phase_s[i], 3),
                        fmt::format("{:.0f} %", 100 * plan.phase_s[i] / plan.step_s)});
  for (const Milestone& milestone : plan.milestones)
    milestones.push_back({milestone.name, fmt::format("{}", milestone.steps), time_text(milestone.days),
                          cost_text(plan.options, milestone.cost)});
  page.section("Time");
  page.table({"phase of the step", "ms", "share"}, phases);
  page.section("Milestones");
  page.table({"", "steps", "time", "cost"}, milestones);
}

void add_scaling(Page& page, const Plan& plan) {
  if (!shows_scaling(plan)) return;
  Rows rows;
  std::vector<PlotPoint> predicted, ideal;
  for (const ScalingPoint& point : plan.scaling) {
    const double gpus = static_cast<double>(point.gpus);
    predicted.push_back({std::log2(gpus), point.images_per_s});
    ideal.push_back({std::log2(gpus), plan.scaling.front().images_per_s * gpus});
    rows.push_back({fmt::format("{}", point.gpus), number_text(point.step_s, 3),
                    number_text(point.images_per_s), fmt::format("{:.0f} %", 100 * point.efficiency),
                    time_text(point.days), cost_text(plan.options, point.cost)});
  }
  page.section("The same images per GPU on other numbers of GPUs");
  page.plot({.title = "Images/s", .x_label = "log2 of the number of GPUs", .log_y = true},
            {{.name = "ideal", .color = "#10b981", .points = ideal, .faint = true},
             {.name = "predicted", .color = "#2563eb", .points = predicted}});
  page.table({"GPUs", "step, s", "images/s", "efficiency", "time", "cost"}, rows);
}

void add_list(Page& page, const char* title, const std::vector<std::string>& lines) {
  page.section(title);
  for (const std::string& line : lines) page.item(line);
}

}  // namespace

std::string to_html(const Plan& plan) {
  const TrainOptions& train = plan.options.train;
  const PeakShare& share = plan.peak_share;
  Page page(fmt::format("{} on {} x {}", train.model.name, plan.options.gpus, plan.machine.name));
  page.text(fmt::format("{} px, {}, {} images a step, {} per pass; speeds of the machine: {} ({})",
                        train.data.image_size, choice_name(train.compute.dtype), train.global_batch,
                        plan.micro_batch, plan.machine.measured ? "measured" : "not measured",
                        plan.machine.source));
  page.text(fmt::format("{}: {} of {} GiB needed, the most in: {}", plan.fits ? "Fits" : "Does not fit",
                        gib_text(plan.needed_bytes), gib_text(plan.machine.memory_bytes), plan.needed_phase),
            "verdict");
  if (plan.half_precision_speed > 1.5)
    page.text(
        fmt::format("In f32 it takes {:.1f} times as long as in half precision", plan.half_precision_speed),
        "verdict");
  page.text(fmt::format("{} s a step, {} images/s{}; {} steps take {}{}", number_text(plan.step_s, 3),
                        number_text(plan.images_per_s),
                        share.of_profile > 0 ? fmt::format(", {:.0f} % of peak", 100 * share.of_profile) : "",
                        plan.steps, time_text(plan.days), cost_text(plan.options, plan.cost, ", cost ")));
  page.text(share.problem);
  add_list(page, "Advice", plan.advice);
  add_memory(page, plan);
  add_times(page, plan);
  add_scaling(page, plan);
  add_list(
      page, "Disk",
      {samples_text(plan.samples), rate_text(plan),
       fmt::format("checkpoint {} GiB, {} kept", gib_text(plan.checkpoint_bytes), plan.num_checkpoints)});
  add_list(page, "Not in this plan", plan.notes);
  return page.html();
}

}  // namespace kiln
