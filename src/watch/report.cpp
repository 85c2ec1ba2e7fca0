#include "watch/report.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <span>

#include "core/error.h"
#include "core/files/atomic_file.h"
#include "core/units.h"
#include "data/images/png_text.h"
#include "evaluate/protocol.h"
#include "run/train_options.h"
#include "watch/precision_audit.h"
#include "watch/report_parts.h"

namespace kiln {

namespace fs = std::filesystem;

namespace {

using Json = nlohmann::json;

constexpr const char* kBlue = "#2563eb";
constexpr const char* kQuartileColors[] = {"#0ea5e9", "#10b981", "#f59e0b", "#ef4444"};
constexpr size_t kMaxGrids = 12;

constexpr const char* kStyle = R"(
:root { color-scheme: light dark; --ink: #1e293b; --soft: #64748b; --line: #e2e8f0; --page: #f8fafc; --card: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e2e8f0; --soft: #94a3b8; --line: #334155; --page: #0f172a; --card: #1e293b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1360px; padding: 28px 24px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 26px; margin: 0 0 2px; } h2 { font-size: 18px; margin: 34px 0 12px; } p { margin: 0; color: var(--soft); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 12px; margin: 22px 0; }
.card, .plot { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px 16px; }
.card > b { display: block; font-size: 21px; font-variant-numeric: tabular-nums; } .card > span { color: var(--soft); font-size: 13px; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(480px, 100%), 1fr)); gap: 14px; }
.card, .plot { overflow-x: auto; } td { overflow-wrap: anywhere; max-width: 40ch; }
svg { display: block; width: 100%; height: auto; } .title { font: 600 14px system-ui, sans-serif; fill: var(--ink); }
.tick { font: 11px system-ui, sans-serif; fill: var(--soft); } .legend { font: 12px system-ui, sans-serif; fill: var(--soft); }
.grid { stroke: var(--line); }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(240px, 100%), 1fr)); gap: 14px; }
figure { margin: 0; } figure img { width: 100%; image-rendering: pixelated; border-radius: 8px; border: 1px solid var(--line); }
figcaption { color: var(--soft); font-size: 13px; text-align: center; }
@media (max-width: 600px) { body { padding: 14px 10px; } .cards { grid-template-columns: 1fr 1fr; } h1 { overflow-wrap: anywhere; } }
.rows b { min-width: 0; text-align: right; } .rows.wide b { text-align: left; }
.rows { columns: 300px 3; column-gap: 32px; font-size: 13px; } .rows.wide { columns: 1; }
.key { display: flex; flex-wrap: wrap; gap: 4px 14px; margin-top: 6px; color: var(--soft); font-size: 12px; }
.key i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; width: 100%; }
td, th { text-align: right; padding: 3px 10px; border-bottom: 1px solid var(--line); } td:first-child, th:first-child { text-align: left; }
th { color: var(--soft); font-weight: 600; } .finding { color: #b45309; font-weight: 600; margin-bottom: 8px; }
.rows div { display: flex; justify-content: space-between; gap: 16px; padding: 3px 0; border-bottom: 1px solid var(--line);
  break-inside: avoid; overflow-wrap: anywhere; } .rows span { color: var(--soft); white-space: nowrap; }
)";

std::string base64(const std::string& bytes) {
  static constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t group = 0;
    for (size_t j = 0; j < 3; ++j)
      group = group << 8 | (i + j < bytes.size() ? static_cast<uint8_t>(bytes[i + j]) : 0u);
    for (size_t j = 0; j < 4; ++j) text += i + j <= bytes.size() ? kDigits[group >> (18 - 6 * j) & 63] : '=';
  }
  return text;
}

std::string card(const std::string& value, const std::string& name) {
  return fmt::format("<div class=\"card\"><b>{}</b><span>{}</span></div>\n", value, name);
}

std::string quartile_plot(const std::vector<Json>& lines) {
  static constexpr const char* kNames[] = {"t 0-25 %", "25-50 %", "50-75 %", "75-100 %"};
  std::vector<PlotSeries> series;
  for (size_t q = 0; q < 4; ++q) {
    std::vector<PlotPoint> points;
    for (const Json& line : lines) {
      const auto quartiles = line.find("loss_quartiles");
      if (quartiles != line.end() && quartiles->at(q).is_number())
        points.push_back({number(line, "step"), quartiles->at(q).get<double>()});
    }
    series.push_back({.name = kNames[q], .color = kQuartileColors[q], .points = smoothed(points)});
  }
  return plot({.title = "Loss by timestep", .x_label = "step", .log_y = true}, series);
}

std::string plots(const ReportedRun& run) {
  const std::vector<Json>& lines = run.steps;
  const std::vector<PlotPoint> validation = run.validation();
  const auto loss = points_of(lines, "loss"), speed = points_of(lines, "images_per_s"),
             grad_norm = points_of(lines, "grad_norm");
  std::string html =
      "<p>Losses of different objectives do not compare: 0.7 or 0.8 is as normal for a flow as 0.13 for "
      "iddpm or "
      "epsilon.</p>\n<div class=\"plots\">\n";
  std::vector<PlotSeries> losses = {{.name = "logged", .color = kBlue, .points = loss, .faint = true},
                                    {.name = "smoothed", .color = kBlue, .points = smoothed(loss)}};
  if (!validation.empty()) losses.push_back({.name = "validation", .color = "#f59e0b", .points = validation});
  html += plot({.title = "Loss", .x_label = "step", .log_y = true}, losses);
  html += quartile_plot(lines);
  html += plot({.title = "Throughput, images/s", .x_label = "step", .from_zero = true},
               {{.name = "", .color = "#10b981", .points = speed}});
  std::vector<PlotSeries> memory = {
      {.name = "host", .color = "#8b5cf6", .points = points_of(lines, "host_bytes", 1e-9)}};
  if (std::ranges::any_of(lines, [](const Json& line) { return number(line, "device_bytes") > 0; }))
    memory.push_back({.name = "GPU", .color = "#f59e0b", .points = points_of(lines, "device_bytes", 1e-9)});
  if (std::ranges::any_of(lines, [](const Json& line) { return line.contains("gpu_memory_bytes"); }))
    memory.push_back({.name = "GPU, all programs",
                      .color = "#94a3b8",
                      .points = points_of(lines, "gpu_memory_bytes", 1e-9)});
  html += plot({.title = "Memory, GB", .x_label = "step", .from_zero = true}, memory);
  html += phase_plot(lines) + loader_plots(lines) + gpu_plots(lines);
  html += plot({.title = "Learning rate", .x_label = "step", .from_zero = true},
               {{.name = "", .color = kBlue, .points = points_of(lines, "lr")}});
  html += plot({.title = "Gradient norm", .x_label = "step", .log_y = true},
               {{.name = "", .color = kBlue, .points = grad_norm, .faint = true},
                {.name = "", .color = kBlue, .points = smoothed(grad_norm)}});
  return html + "</div>\n";
}

std::string cards(const ReportedRun& run, double cost_per_hour) {
  if (run.steps.empty()) return "";
  const double speed = run.median("images_per_s"), peak_share = run.median("peak_share");
  std::string html = "<div class=\"cards\">\n";
  const auto loss = smoothed(points_of(run.steps, "loss")), validation = run.validation();
  if (!loss.empty()) html += card(fmt::format("{:.4f}", loss.back().y), "loss, smoothed");
  if (!validation.empty()) html += card(fmt::format("{:.4f}", validation.back().y), "validation loss, last");
  html += card(fmt::format("{}", run.last_step), "steps");
  html += card(fmt::format("{}", run.images), "images seen");
  html += card(duration_text(run.seconds), "training time");
  html += card(fmt::format("{:.1f}", speed), "images/s, median");
  html += card(number_text(run.median("tflops"), 3),
               peak_share > 0 ? fmt::format("TFLOP/s, {:.0f} % of peak", 100 * peak_share) : "TFLOP/s");
  if (const double mfu = run.median("mfu"); std::isfinite(mfu))
    html += card(fmt::format("{:.0f} %", 100 * mfu), "MFU, of the data sheet's peak");
  html += card(fmt::format("{:.2f} GB", run.highest("peak_host_bytes") / 1e9), "host memory, highest");
  if (const double device = run.highest("peak_device_bytes"); device > 0)
    html += card(fmt::format("{:.2f} GB", device / 1e9), "GPU memory, highest");
  if (cost_per_hour > 0)
    html += card(fmt::format("{:.2f}", cost_per_hour * run.seconds / 3600), "cost so far") +
            card(fmt::format("{:.2f}", cost_per_hour / 3600 / speed * 1e6), "cost of a million images");
  return html + "</div>\n";
}

std::string sample_section(const std::string& run) {
  std::vector<fs::path> grids;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(fs::path(run) / "samples", error))
    if (entry.path().extension() == ".png") grids.push_back(entry.path());
  if (grids.empty()) return "";
  std::ranges::sort(grids);
  const std::string newest = read_grid(grids.back());
  const std::string drawn = grid_text(newest);
  std::string html = "<h2>Samples over time</h2>\n";
  if (!drawn.empty()) html += "<p>" + escape(drawn) + "</p>\n";
  html += "<div class=\"samples\">\n";
  const size_t count = std::min(grids.size(), kMaxGrids);
  for (size_t i = 0; i < count; ++i) {  // evenly spread, always with the newest
    const size_t shown = count == 1 ? grids.size() - 1 : i * (grids.size() - 1) / (count - 1);
    const std::string name = grids[shown].stem().string();
    if (shown + 1 == grids.size()) {
      html += figure(newest, name);
      continue;
    }
    const std::string png = read_grid(grids[shown]), own = grid_text(png);
    html += figure(png, name + (own == drawn || own.empty() ? "" : ": " + own));
  }
  return html + "</div>\n";
}

// A model's config is an option as JSON text. What it leaves open is not shown.
std::string option_text(const Json& value) {
  std::string text = field_text(value);
  const Json config = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!config.is_object()) return text;
  std::string fields;
  for (const auto& [name, field] : config.items())
    if (!field.is_null())
      fields += fmt::format("{}{} {}", fields.empty() ? "" : ", ", name, field_text(field));
  return fields;
}

std::string settings(const Json& options) {
  std::string html;
  for (const auto& [name, value] : options.items())
    if (value != "") html += row(name, option_text(value));  // the others are not set
  return html.empty() ? "" : "<h2>Settings</h2>\n<div class=\"card rows\">\n" + html + "</div>\n";
}

// Returns when an event was, and its fields: "step 120", "loss scale: loss_scale 4096".
std::string event_row(const Json& line) {
  std::string name = field_text(line["event"]), fields;
  std::ranges::replace(name, '_', ' ');
  for (const auto& [key, value] : line.items())
    if (key != "event" && key != "step")
      fields += fmt::format("{}{} {}", fields.empty() ? ": " : ", ", key, field_text(value));
  return row(line.contains("step") ? "step " + line["step"].dump() : "before the first step", name + fields);
}

std::string events(const std::vector<Json>& lines) {
  std::string html;
  for (const Json& line : lines)
    // Plots show validations and evaluations.
    if (line.contains("event") && line["event"] != "validation" && line["event"] != "evaluation")
      html += event_row(line);
  return html.empty() ? "" : "<h2>Events</h2>\n<div class=\"card rows wide\">\n" + html + "</div>\n";
}

}  // namespace

std::string read_grid(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string figure(const std::string& png, const std::string& caption) {
  return fmt::format(
      "<figure><img alt=\"samples\" "
      "src=\"data:image/png;base64,{}\"><figcaption>{}</figcaption></figure>\n",
      base64(png), escape(caption));
}

std::string grid_text(const std::string& png) try {
  constexpr size_t kMostShown = 16;
  for (const auto& [keyword, text] : png_texts(std::as_bytes(std::span(png)))) {
    if (keyword != "kiln") continue;
    const Json drawn = Json::parse(text);
    std::string told =
        fmt::format("seed {}, {} in {} steps, guidance {:g}, {}", drawn.at("seed").get<uint64_t>(),
                    drawn.at("sampler").get<std::string>(), drawn.at("num_sampling_steps").get<int64_t>(),
                    drawn.at("cfg_scale").get<double>(), drawn.at("weights").get<std::string>());
    const auto shown =
        drawn.value(drawn.contains("prompts") ? "prompts" : "classes", std::vector<std::string>());
    for (size_t i = 0; i < std::min(shown.size(), kMostShown); ++i) {
      told += i == 0 ? ": " : " | ";
      told += shown[i];
    }
    return told + (shown.size() > kMostShown ? " | ..." : "");
  }
  return "";
} catch (const Json::exception&) {  // somebody else's picture
  return "";
}

std::string page(const std::string& title, const std::string& body) {
  return fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
      "content=\"width=device-width\"><title>{0}</title><style>{1}</style></head><body>\n<h1>{0}</h1>\n{2}"
      "</body></html>\n",
      escape(title), kStyle, body);
}

void write_report(const std::string& folder, const std::string& out) {
  const ReportedRun run = read_reported_run(folder);
  std::string html;
  double cost_per_hour = 0;
  if (run.saved) {
    WatchOptions prices;
    prices.cost_per_hour = run.options.value("cost-per-hour", 0.0);
    prices.price_per_gpu_hour = run.options.value("price-per-gpu-hour", 0.0);
    cost_per_hour = cost_per_hour_of(prices, run.saved->world_size);
    html =
        fmt::format("<p>{}, {}, {} px, on {}, {} threads{}</p>\n", escape(run.options.value("model", "")),
                    escape(run.options.value("objective", "")), run.options.value("image-size", int64_t{0}),
                    escape(run.saved->machine), run.saved->num_threads,
                    run.saved->world_size > 1 ? fmt::format(", {} ranks", run.saved->world_size) : "");
  }
  html += cards(run, cost_per_hour) + plots(run) + stage_section(run) + plan_section(folder) +
          precision_section(folder) + evaluation_section(run) + sample_section(folder) + events(run.log) +
          settings(run.options);
  write_file_atomically("report", out.empty() ? (fs::path(folder) / "report.html").string() : out,
                        page(run.name, html));
}

}  // namespace kiln
