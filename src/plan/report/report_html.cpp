// A plan as one self-contained page.
#include <fmt/format.h>

#include <cmath>

#include "core/tensors.h"
#include "core/units.h"
#include "plan/report/report.h"
#include "plan/run/data_text.h"
#include "watch/report_parts.h"

namespace kiln {

namespace {

constexpr const char* kStyle = R"(
:root { color-scheme: light dark; --ink: #1e293b; --soft: #64748b; --line: #e2e8f0; --page: #f8fafc; --card: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e2e8f0; --soft: #94a3b8; --line: #334155; --page: #0f172a; --card: #1e293b; } }
body { margin: 0 auto; max-width: 1100px; padding: 28px 24px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 26px; margin: 0; } h2 { font-size: 18px; margin: 30px 0 10px; } p { margin: 0 0 8px; color: var(--soft); }
.plot { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px 16px; margin: 14px 0; }
svg { display: block; width: 100%; height: auto; } .title { font: 600 14px system-ui, sans-serif; fill: var(--ink); }
.tick { font: 11px system-ui, sans-serif; fill: var(--soft); } .legend { font: 12px system-ui, sans-serif; fill: var(--soft); }
.grid { stroke: var(--line); }
table { border-collapse: collapse; background: var(--card); display: block; overflow-x: auto; max-width: 100%; } td, th { padding: 4px 14px; border: 1px solid var(--line);
  text-align: right; font-variant-numeric: tabular-nums; } td:first-child, th:first-child { text-align: left; }
.verdict { font-size: 19px; color: var(--ink); font-weight: 600; }
)";

std::string row(const std::vector<std::string>& cells, const char* tag = "td") {
  std::string html = "<tr>";
  for (const std::string& cell : cells) html += fmt::format("<{0}>{1}</{0}>", tag, escape(cell));
  return html + "</tr>\n";
}

std::string time_text(double days) { return duration_text(days * kSecondsPerDay); }

std::string scaling_plot(const Plan& plan) {
  if (!shows_scaling(plan)) return "";
  std::vector<PlotPoint> predicted, ideal;
  for (const ScalingPoint& point : plan.scaling) {
    const double gpus = static_cast<double>(point.gpus);
    predicted.push_back({std::log2(gpus), point.images_per_s});
    ideal.push_back({std::log2(gpus), plan.scaling.front().images_per_s * gpus});
  }
  return plot({.title = "Images/s", .x_label = "log2 of the number of GPUs", .log_y = true},
              {{.name = "ideal", .color = "#10b981", .points = ideal, .faint = true},
               {.name = "predicted", .color = "#2563eb", .points = predicted}});
}

std::string memory_tables(const Plan& plan) {
  std::string html =
      "<h2>Memory of one device, GiB</h2>\n<table>" + row({"at the peak of a step", "GiB"}, "th");
  for (const auto* map : {&plan.by_kind, &plan.overhead})
    for (const auto& [kind, bytes] : *map) html += row({kind, gib_text(bytes)});
  html += "</table>\n<h2>By phase, GiB</h2>\n<table>" +
          row({"phase", "device", "host", "pinned host", "NVMe"}, "th");
  for (const PhasePlan& phase : plan.phases)
    html += row({phase.name, gib_text(phase.bytes.device), gib_text(phase.bytes.host),
                 gib_text(phase.bytes.pinned_host), gib_text(phase.bytes.nvme)});
  return html + "</table>\n";
}

std::string time_tables(const Plan& plan) {
  std::string html = "<h2>Time</h2>\n<table>" + row({"phase of the step", "ms", "share"}, "th");
  for (size_t i = 0; i < plan.phase_s.size(); ++i)
    if (plan.phase_s[i] > 0)
      html += row({std::string(name_of(static_cast<StepPhase>(i))), number_text(1e3 * plan.phase_s[i], 3),
                   fmt::format("{:.0f} %", 100 * plan.phase_s[i] / plan.step_s)});
  html += "</table>\n<h2>Milestones</h2>\n<table>" + row({"", "steps", "time", "cost"}, "th");
  for (const Milestone& milestone : plan.milestones)
    html += row({milestone.name, fmt::format("{}", milestone.steps), time_text(milestone.days),
                 cost_text(plan.options, milestone.cost)});
  if (!shows_scaling(plan)) return html + "</table>\n";
  html += "</table>\n<h2>The same images per GPU on other numbers of GPUs</h2>\n<table>" +
          row({"GPUs", "step, s", "images/s", "efficiency", "time", "cost"}, "th");
  for (const ScalingPoint& point : plan.scaling)
    html += row({fmt::format("{}", point.gpus), number_text(point.step_s, 3), number_text(point.images_per_s),
                 fmt::format("{:.0f} %", 100 * point.efficiency), time_text(point.days),
                 cost_text(plan.options, point.cost)});
  return html + "</table>\n";
}

std::string html_list(const char* title, const std::vector<std::string>& lines) {
  if (lines.empty()) return "";
  std::string html = fmt::format("<h2>{}</h2>\n<ul>\n", title);
  for (const std::string& line : lines) html += "<li>" + escape(line) + "</li>\n";
  return html + "</ul>\n";
}

std::string disk_list(const Plan& plan) {
  return html_list("Disk", {samples_text(plan.samples), rate_text(plan),
                            fmt::format("checkpoint {} GiB, {} kept", gib_text(plan.checkpoint_bytes),
                                        plan.num_checkpoints)});
}

}  // namespace

std::string to_html(const Plan& plan) {
  const TrainOptions& train = plan.options.train;
  const PeakShare& share = plan.peak_share;
  const std::string title =
      fmt::format("{} on {} x {}", train.model.name, plan.options.gpus, plan.machine.name);
  std::string html = fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
      "content=\"width=device-width\"><title>{0}</title><style>{1}</style></head><body>\n<h1>{0}</h1>\n",
      escape(title), kStyle);
  html += fmt::format("<p>{} px, {}, {} images a step, {} per pass; speeds of the machine: {} ({})</p>\n",
                      train.data.image_size, choice_name(train.compute.dtype), train.global_batch,
                      plan.micro_batch, plan.machine.measured ? "measured" : "not measured",
                      escape(plan.machine.source));
  html += fmt::format("<p class=\"verdict\">{}: {} of {} GiB needed, the most in: {}</p>\n",
                      plan.fits ? "Fits" : "Does not fit", gib_text(plan.needed_bytes),
                      gib_text(plan.machine.memory_bytes), plan.needed_phase);
  if (plan.half_precision_speed > 1.5)
    html +=
        fmt::format("<p class=\"verdict\">In f32 it takes {:.1f} times as long as in half precision</p>\n",
                    plan.half_precision_speed);
  html +=
      fmt::format("<p>{} s a step, {} images/s{}; {} steps take {}{}</p>\n", number_text(plan.step_s, 3),
                  number_text(plan.images_per_s),
                  share.of_profile > 0 ? fmt::format(", {:.0f} % of peak", 100 * share.of_profile) : "",
                  plan.steps, time_text(plan.days), escape(cost_text(plan.options, plan.cost, ", cost ")));
  if (!share.problem.empty()) html += fmt::format("<p>{}</p>\n", escape(share.problem));
  return html + html_list("Advice", plan.advice) + memory_plot(plan.curve) + memory_tables(plan) +
         time_tables(plan) + scaling_plot(plan) + disk_list(plan) +
         html_list("Not in this plan", plan.notes) + "</body></html>\n";
}

}  // namespace kiln
