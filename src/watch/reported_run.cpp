#include "watch/reported_run.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "core/error.h"
#include "core/files/entries.h"
#include "core/files/input_file.h"
#include "core/measuring.h"
#include "core/text/json_text.h"
#include "data/images/images.h"
#include "watch/run_log.h"
#include "watch/thinned_lines.h"

namespace kiln {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using nlohmann::literals::operator""_json_pointer;

// A training reads its own log for its report: that takes no more memory, and no longer page, the longer it
// has trained.
constexpr size_t kMostLines = 2000;

std::vector<Json> read_evaluations(const std::string& run) {
  std::vector<Json> results;
  const std::string path = fs::path(run) / "evaluations.jsonl";
  if (!fs::is_regular_file(path)) return results;
  LineReader file("report", path);
  for (std::string line; file.next(line);) {
    Json result = json_or_discarded("report", line, path);
    if (!result.is_object() || !result.contains("metrics") || !result.contains("protocol")) continue;
    // The samples are in RUN/evaluation/step-00001000-HASH.
    const std::string samples = fs::path(result.value("/subject/samples"_json_pointer, "")).filename();
    if (const auto step = step_of_checkpoint(samples.substr(0, samples.rfind('-')))) result["step"] = *step;
    results.push_back(std::move(result));
  }
  return results;
}

int64_t count_of(const Json& line, const char* key) {
  const auto found = line.find(key);
  return found != line.end() && is_integer(*found) ? found->get<int64_t>() : 0;
}

// Replaces the options of drawing by how the run's record says that its pictures are drawn. Without a record
// they count only where the run itself drew.
void take_drawing(const Json& record, Json& options) {
  constexpr std::pair<const char*, const char*> kKeys[] = {
      {"sampler", "sampler"}, {"num-sampling-steps", "num_sampling_steps"}, {"cfg-scale", "cfg_scale"}};
  const Json drawing = record.value("drawing", Json::object());
  const auto is_on = [&](const char* every) { return options.value(every, int64_t{0}) > 0; };
  const bool draws = is_on("sample-every") || is_on("evaluate-every");
  for (const auto& [option, key] : kKeys)
    if (drawing.contains(key))
      options[option] = drawing.at(key);
    else if (!draws)
      options.erase(option);
}

// Returns what the file of a grid says of it.
std::string grid_text(const std::string& png) try {
  constexpr size_t kMostShown = 16;
  for (const auto& [keyword, text] : png_texts(std::as_bytes(std::span(png)))) {
    if (keyword != "kiln") continue;
    const Json drawn = parse_json("report", text, "the text of a picture");
    auto shown = drawn.value(drawn.contains("prompts") ? "prompts" : "classes", std::vector<std::string>());
    if (shown.size() > kMostShown) shown.resize(kMostShown + 1), shown.back() = "...";
    return fmt::format("seed {}, {} in {} steps, guidance {:g}, {}{}{}", drawn.at("seed").get<uint64_t>(),
                       drawn.at("sampler").get<std::string>(), drawn.at("num_sampling_steps").get<int64_t>(),
                       drawn.at("cfg_scale").get<double>(), drawn.at("weights").get<std::string>(),
                       shown.empty() ? "" : ": ", fmt::join(shown, " | "));
  }
  return "";
} catch (const std::exception&) {  // somebody else's picture
  return "";
}

}  // namespace

double number(const Json& line, const std::string& key) {
  const auto found = line.find(key);
  return found != line.end() && found->is_number() ? found->get<double>() : std::nan("");
}

std::vector<PlotPoint> points_of(const std::vector<Json>& lines, const char* key, double scale) {
  std::vector<PlotPoint> points;
  for (const Json& line : lines)
    if (const double value = number(line, key); std::isfinite(value))
      points.push_back({number(line, "step"), value * scale});
  return points;
}

std::vector<PlotPoint> smoothed(const std::vector<PlotPoint>& points) {
  const double decay = 1 - 1 / std::max(1.0, static_cast<double>(points.size()) / 20);
  std::vector<PlotPoint> means;
  double sum = 0, weight = 0;
  for (const PlotPoint& point : points) {
    sum = decay * sum + point.y;
    weight = decay * weight + 1;
    means.push_back({point.x, sum / weight});
  }
  return means;
}

double ReportedRun::median(const char* key) const {
  std::vector<double> values;
  for (const PlotPoint& point : points_of(steps, key)) values.push_back(point.y);
  return values.empty() ? std::nan("") : kiln::median(values);
}

double ReportedRun::highest(const char* key) const {
  double most = std::nan("");
  for (const PlotPoint& point : points_of(steps, key)) most = std::fmax(most, point.y);
  return most;
}

void require_run_folder(const char* who, const std::string& folder) {
  if (const fs::path path = folder; !fs::exists(path / "log.jsonl") && !fs::exists(path / "checkpoints"))
    fail(who, "{} is not a run folder: it has neither log.jsonl nor checkpoints", folder);
}

ReportedRun unread_run(const std::string& folder) {
  ReportedRun run{.folder = folder, .name = fs::absolute(folder).lexically_normal().string()};
  if (run.name.ends_with('/')) run.name.pop_back();
  run.name = fs::path(run.name).filename().string();
  return run;
}

void count_line(const Json& line, ReportedRun& run) {
  if (line.value("event", Json()) == "evaluation" && line.contains("metrics"))
    run.in_training.push_back(line);
  const int64_t step = count_of(line, "step");
  if (!line.contains("loss") || step < run.last_step) return;  // a checkpoint may be newer than this line
  run.last_step = step;
  run.images = count_of(line, "images_seen");
  if (const double seconds = number(line, "train_seconds"); std::isfinite(seconds)) run.seconds = seconds;
}

void read_beside_log(ReportedRun& run) {
  run.by_command = read_evaluations(run.folder);
  const std::vector<Checkpoint> checkpoints = list_checkpoints(run.folder);
  if (checkpoints.empty()) return;
  run.saved = read_train_state(checkpoints.back().folder);
  run.options = run.saved->config.value("options", Json::object());
  run.record = run.saved->config.value("record", Json::object());
  take_drawing(run.record, run.options);
  if (run.saved->step > run.last_step) {
    run.last_step = run.saved->step;
    run.images = run.saved->images_seen;
    run.seconds = run.saved->train_seconds;
  }
}

ReportedRun read_reported_run(const std::string& folder) {
  ReportedRun run = unread_run(folder);
  ThinnedLines steps(kMostLines);
  read_run_log(folder, [&](Json line) {
    count_line(line, run);
    if (line.contains("event")) run.log.push_back(line);
    if (line.contains("loss")) steps.add(std::move(line));
  });
  run.steps = std::move(steps).lines();
  read_beside_log(run);
  return run;
}

std::vector<fs::path> grid_paths(const std::string& run) {
  std::vector<fs::path> paths;
  for (const auto& entry : readable_entries_of(fs::path(run) / "samples"))
    if (entry.is_regular_file() && entry.path().extension() == ".png") paths.push_back(entry.path());
  std::ranges::sort(paths);
  return paths;
}

std::vector<fs::path> spread(const std::vector<fs::path>& paths, size_t most) {
  const size_t count = std::min(paths.size(), most);
  std::vector<fs::path> chosen;
  for (size_t left = count; left-- > 0;)  // so many come after this one
    chosen.push_back(paths[paths.size() - 1 - left * (paths.size() - 1) / std::max<size_t>(count - 1, 1)]);
  return chosen;
}

ReportedGrid read_grid(const fs::path& path, std::string source) {
  const std::string png = read_input("report", path.string(), kMostPictureBytes);
  return {.name = path.stem().string(),
          .source = source.empty() ? embedded(png) : std::move(source),
          .drawn = grid_text(png)};
}

std::vector<ReportedGrid> read_grids(const std::string& run, size_t most) {
  std::vector<ReportedGrid> grids;
  for (const fs::path& path : spread(grid_paths(run), most)) grids.push_back(read_grid(path));
  return grids;
}

}  // namespace kiln
