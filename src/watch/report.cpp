#include "watch/report.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>

#include "core/error.h"
#include "core/files/atomic_file.h"
#include "core/files/text_file.h"
#include "core/text/json_text.h"
#include "core/units.h"
#include "evaluate/protocol.h"
#include "run/train_options.h"
#include "watch/phase_timers.h"
#include "watch/precision_audit.h"
#include "watch/report_parts.h"
#include "watch/thinned_lines.h"

namespace kiln {

namespace fs = std::filesystem;

namespace {

using Json = nlohmann::json;

constexpr const char* kBlue = "#2563eb";

void add_figures(Page& page, const ReportedRun& run, double cost_per_hour) {
  if (run.steps.empty()) return;
  const double speed = run.median("images_per_s"), peak_share = run.median("peak_share");
  const auto loss = smoothed(points_of(run.steps, "loss")), validation = run.validation();
  if (!loss.empty()) page.figure(fmt::format("{:.4f}", loss.back().y), "loss, smoothed");
  if (!validation.empty()) page.figure(fmt::format("{:.4f}", validation.back().y), "validation loss, last");
  page.figure(fmt::format("{}", run.last_step), "steps");
  page.figure(fmt::format("{}", run.images), "images seen");
  page.figure(duration_text(run.seconds), "training time");
  page.figure(fmt::format("{:.1f}", speed), "images/s, median");
  page.figure(number_text(run.median("tflops"), 3),
              peak_share > 0 ? fmt::format("TFLOP/s, {:.0f} % of peak", 100 * peak_share) : "TFLOP/s");
  if (const double mfu = run.median("mfu"); std::isfinite(mfu))
    page.figure(fmt::format("{:.0f} %", 100 * mfu), "MFU, of the data sheet's peak");
  page.figure(fmt::format("{:.2f} GB", run.highest("peak_host_bytes") / 1e9), "host memory, highest");
  if (const double device = run.highest("peak_device_bytes"); device > 0)
    page.figure(fmt::format("{:.2f} GB", device / 1e9), "GPU memory, highest");
  if (cost_per_hour <= 0) return;
  page.figure(fmt::format("{:.2f}", cost_per_hour * run.seconds / 3600), "cost so far");
  page.figure(fmt::format("{:.2f}", cost_per_hour / 3600 / speed * 1e6), "cost of a million images");
}

// Returns the time of a step by groups of phases, without those that take none.
std::vector<PlotSeries> phases(const std::vector<Json>& lines) {
  std::vector<PlotSeries> series;
  for (const PhaseGroup& group : phase_groups()) {
    PlotSeries one{.name = group.name, .color = group.color, .stacked = true};
    for (const Json& line : lines)
      if (line.contains("phase_s"))
        one.points.push_back({number(line, "step"), 1e3 * group.seconds(line.at("phase_s"))});
    if (std::ranges::any_of(one.points, [](const PlotPoint& point) { return point.y > 0; }))
      series.push_back(std::move(one));
  }
  return series;
}

// Adds the lowest and the highest values that lines which are means keep of the lines they were made of.
std::vector<PlotSeries> with_extremes(const std::vector<Json>& lines, const char* key,
                                      std::vector<PlotSeries> series) {
  for (const char* extreme : {kLowest, kHighest}) {
    PlotSeries one{.color = kBlue, .points = {}, .faint = true};
    for (const Json& line : lines)
      if (const auto kept = line.find(extreme); kept != line.end())
        one.points.push_back({number(line, "step"), number(*kept, key)});
    if (!one.points.empty()) series.push_back(std::move(one));
  }
  return series;
}

void add_curves(Page& page, const ReportedRun& run) {
  constexpr const char* kQuartiles[] = {"t 0-25 %", "25-50 %", "50-75 %", "75-100 %"};
  const std::vector<Json>& lines = run.steps;
  const auto loss = points_of(lines, "loss"), grad_norm = points_of(lines, "grad_norm");
  const auto curve = [&](const char* title, const char* key, double scale = 1) {
    page.plot({.title = title, .from_zero = true}, {{.points = points_of(lines, key, scale)}});
  };
  page.text(
      "Losses of different objectives do not compare: 0.7 or 0.8 is as normal for a flow as 0.13 for iddpm "
      "or "
      "epsilon.");
  page.plot({.title = "Loss", .log_y = true},
            with_extremes(lines, "loss",
                          {{.name = "logged", .color = kBlue, .points = loss, .faint = true},
                           {.name = "smoothed", .color = kBlue, .points = smoothed(loss)},
                           {.name = "validation", .color = "#f59e0b", .points = run.validation()}}));
  std::vector<PlotSeries> quartiles = series_of(lines, "loss_quartiles");
  for (size_t i = 0; i < std::min(quartiles.size(), std::size(kQuartiles)); ++i)
    quartiles[i] = {.name = kQuartiles[i], .points = smoothed(quartiles[i].points)};
  page.plot({.title = "Loss by timestep", .log_y = true}, quartiles);
  add_losses(page, "Terms of the loss", series_of(lines, "loss_by_term"));
  curve("Throughput, images/s", "images_per_s");
  std::vector<PlotSeries> memory = {
      {.name = "host", .points = points_of(lines, "host_bytes", 1e-9)},
      {.name = "GPU, all programs", .points = points_of(lines, "gpu_memory_bytes", 1e-9)}};
  if (run.highest("device_bytes") > 0)
    memory.push_back({.name = "GPU", .points = points_of(lines, "device_bytes", 1e-9)});
  page.plot({.title = "Memory, GB", .from_zero = true}, memory);
  page.plot({.title = "Time of a step, ms", .from_zero = true}, phases(lines));
  curve("Waiting for data, % of the time", "stall_share", 100);
  curve("Batches ready", "queue_depth");
  std::vector<PlotSeries> busy = series_of(lines, "gpus", "utilisation", 100);
  for (PlotSeries& gpu : busy) gpu.name = "GPU " + gpu.name;
  if (busy.empty()) busy.push_back({.points = points_of(lines, "gpu_utilisation", 100)});
  page.plot({.title = "GPU busy, % of the time", .from_zero = true}, busy);
  curve("GPU power, W", "gpu_watts");
  curve("Learning rate", "lr");
  page.plot({.title = "Gradient norm", .log_y = true},
            with_extremes(lines, "grad_norm",
                          {{.color = kBlue, .points = grad_norm, .faint = true},
                           {.color = kBlue, .points = smoothed(grad_norm)}}));
}

void add_samples(Page& page, const std::vector<ReportedGrid>& grids) {
  page.section("Samples over time");
  if (!grids.empty()) page.text(grids.back().drawn);
  for (const ReportedGrid& grid : grids) {
    const bool is_said = grid.drawn == grids.back().drawn || grid.drawn.empty();
    page.picture(grid.source, grid.name + (is_said ? "" : ": " + grid.drawn));
  }
}

// A model's config is an option as JSON text. What it leaves open is not shown.
std::string option_text(const Json& value) {
  std::string text = field_text(value);
  const Json config = json_or_discarded("report", text, "a recorded option");
  if (!config.is_object()) return text;
  std::string fields;
  for (const auto& [name, field] : config.items())
    if (!field.is_null())
      fields += fmt::format("{}{} {}", fields.empty() ? "" : ", ", name, field_text(field));
  return fields;
}

void add_events(Page& page, const std::vector<Json>& lines) {
  std::vector<std::vector<std::string>> rows;
  for (const Json& line : lines) {
    const std::string event = line.contains("event") ? field_text(line["event"]) : "";
    if (event.empty() || event == "validation" || event == "evaluation") continue;  // plots show these two
    std::string fields;
    for (const auto& [key, value] : line.items())
      if (key != "event" && key != "step")
        fields += fmt::format("{}{} {}", fields.empty() ? ": " : ", ", key, field_text(value));
    rows.push_back({line.contains("step") ? "step " + line["step"].dump() : "before the first step",
                    replaced(event, "_", " ") + fields});
  }
  page.table({"when", "event"}, rows);
}

}  // namespace

std::vector<PlotSeries> series_of(const std::vector<Json>& lines, const char* key, const char* of_entry,
                                  double scale) {
  std::map<std::string, std::vector<PlotPoint>> found;
  for (const Json& line : lines) {
    const Json entries = line.value(key, Json());
    for (const auto& [name, entry] : entries.items()) {
      const double value = entry.is_number() ? entry.get<double>() : number(entry, of_entry);
      std::vector<PlotPoint>& points = found[name];  // stays empty where no line has a number
      if (std::isfinite(value)) points.push_back({number(line, "step"), value * scale});
    }
  }
  std::vector<PlotSeries> series;
  for (auto& [name, points] : found) series.push_back({.name = name, .points = std::move(points)});
  return series;
}

Page report_page(const ReportedRun& run) {
  Page page(run.name);
  double cost_per_hour = 0;
  if (run.saved) {
    WatchOptions prices;
    prices.cost_per_hour = run.options.value("cost-per-hour", 0.0);
    prices.price_per_gpu_hour = run.options.value("price-per-gpu-hour", 0.0);
    cost_per_hour = cost_per_hour_of(prices, run.saved->world_size);
    page.text(fmt::format("{}, {}, {} px, on {}, {} threads{}", run.options.value("model", ""),
                          run.options.value("objective", ""), run.options.value("image-size", int64_t{0}),
                          run.saved->machine, run.saved->num_threads,
                          run.saved->world_size > 1 ? fmt::format(", {} ranks", run.saved->world_size) : ""));
  }
  add_figures(page, run, cost_per_hour);
  add_curves(page, run);
  add_stages(page, run);
  add_plan(page, run.folder);
  add_precision(page, run.folder);
  add_evaluation(page, run);
  add_samples(page, run.grids);
  page.section("Events");
  add_events(page, run.log);
  page.section("Settings");
  for (const auto& [name, value] : run.options.items())
    if (value != "") page.row(name, option_text(value));  // the others are not set
  return page;
}

void write_report(const std::string& folder, const std::string& out) {
  ReportedRun run = read_reported_run(folder);
  run.grids = read_grids(folder, kMostGrids);
  write_file_atomically("report", out.empty() ? (fs::path(folder) / "report.html").string() : out,
                        report_page(run).html());
}

}  // namespace kiln
