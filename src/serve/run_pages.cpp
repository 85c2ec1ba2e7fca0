#include "serve/run_pages.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <span>

#include "core/error.h"
#include "core/text/json_text.h"
#include "core/units.h"
#include "watch/phase_timers.h"
#include "watch/report.h"

namespace kiln {

namespace {

using Json = nlohmann::json;

// Groups of phases in which a step does not compute, and why.
constexpr std::pair<const char*, const char*> kCauses[] = {
    {"data", "waiting for the loader"},
    {"encoding", "encoding pictures and captions"},
    {"communication", "communication between ranks"},
    {"offload", "moving state to and from the host or a disk"}};

// Seconds of a step, means over lines.
struct StepTimes {
  std::map<std::string, double> of_group{};
  double all = 0, taken = 0;  // `taken`: the share of the processors' time that others had
};

StepTimes mean_times(std::span<const Json> lines) {
  StepTimes times;
  const auto count = static_cast<double>(lines.size());
  for (const Json& line : lines) {
    const auto phases = line.find("phase_s");
    if (phases == line.end() || !phases->is_object()) continue;
    for (const PhaseGroup& group : phase_groups()) {
      const double seconds = group.seconds(*phases) / count;
      times.of_group[group.name] += seconds;
      times.all += seconds;
    }
    if (const double taken = number(line, "taken_share"); taken > 0) times.taken += taken / count;
  }
  return times;
}

// Returns the seconds that events of a kind took, and their number.
std::pair<double, int64_t> events_of(const ReportedRun& run, const char* event) {
  std::pair<double, int64_t> sum;
  for (const Json& line : run.log) {
    if (line.value("event", Json()) != event) continue;
    if (const double seconds = number(line, "seconds"); seconds > 0) sum.first += seconds;
    ++sum.second;
  }
  return sum;
}

std::string share_text(double share) { return fmt::format("{:.1f} %", 100 * share); }

void add_drawings(Page& page, const std::vector<Playground::Drawing>& drawings) {
  for (const Playground::Drawing& drawing : drawings)
    if (drawing.png)
      page.picture(fmt::format("draws/{}.png", drawing.id), drawing.text);
    else
      page.text(drawing.text);
}

using Field = std::array<const char*, 3>;  // the key, the label and the value of a text that a button sends

Json button(const char* name, const char* path, const std::vector<Field>& fields = {}) {
  return Json::array({name, path, fields});
}

void add_buttons(Page& page, const ReportedRun& run) {
  page.section("Ask the run");
  page.part(
      "forms",
      {{"items", Json::array({button("Checkpoint now", "requests/checkpoint"),
                              button("Sample now", "requests/sample"), button("Stop", "requests/stop")})}});
  if (!run.saved) return;
  const Field what = run.record.contains("text") ? Field{"prompt", "prompt", ""}
                                                 : Field{"classes", "classes, by number or name", ""};
  const std::vector<Field> fields = {what,
                                     {"seed", "seed", "0"},
                                     {"guidance", "guidance", ""},
                                     {"steps", "steps", ""},
                                     {"images", "pictures", "1"}};  // of Playground::begin()
  page.section("Draw from the newest checkpoint");
  page.part("forms", {{"items", Json::array({button("Draw", "draw", fields)})}});
}

}  // namespace

void add_stalls(Page& page, const ReportedRun& run) {
  const std::span<const Json> lines = run.steps;
  const StepTimes whole = mean_times(lines), newest = mean_times(lines.last((lines.size() + 9) / 10));
  page.section("Stalls by cause");
  std::vector<std::vector<std::string>> rows;
  for (const auto& [group, cause] : kCauses)
    if (const double seconds = whole.of_group.contains(group) ? whole.of_group.at(group) : 0; seconds > 0)
      rows.push_back({cause, fmt::format("{:.3g} ms", 1e3 * seconds), share_text(seconds / whole.all),
                      newest.all > 0 ? share_text(newest.of_group.at(group) / newest.all) : "-"});
  if (whole.taken > 0)
    page.text(fmt::format("Other programs had {} of the processors' time, {} in the newest tenth of the run.",
                          share_text(whole.taken), share_text(newest.taken)));
  page.table({"cause", "a step", "of the time", "of the newest tenth"}, rows, "Within steps");
  std::vector<std::vector<std::string>> between;
  for (const char* event : {"validation", "evaluation", "skipped"})
    if (const auto [seconds, count] = events_of(run, event); count > 0)
      between.push_back({event, std::to_string(count), seconds > 0 ? duration_text(seconds) : "not timed"});
  page.table({"event", "times", "took"}, between, "Between steps");
}

Page live_page(const LiveRun& live, const std::vector<Playground::Drawing>& drawings,
               const RunPageOptions& options) {
  const ReportedRun& run = live.run();
  Page page(run.name);
  if (options.has_overview) page.part("links", {{"items", Json::array({Json::array({"all runs", "../"})})}});
  page.text(live.status());
  if (!options.is_read_only) {
    add_buttons(page, run);
    page.section("Drawn");
    add_drawings(page, drawings);
  }
  add_stalls(page, run);
  page.append(report_page(run));
  return page;
}

Page overview_page(const std::vector<LiveRun>& runs) {
  std::vector<ReportedRun> reported;
  Json links = Json::array();
  for (size_t i = 0; i < runs.size(); ++i) {
    ReportedRun& run = reported.emplace_back(runs[i].run());
    run.grids.erase(run.grids.begin(), run.grids.end() - std::min<int64_t>(std::ssize(run.grids), 1));
    for (ReportedGrid& grid : run.grids) grid.source = fmt::format("{}/{}", i, grid.source);
    links.push_back({run.name, fmt::format("{}/", i)});
  }
  Page page(fmt::format("{} runs", runs.size()));
  page.part("links", {{"items", links}});
  for (const LiveRun& run : runs)
    if (!run.problem().empty() || run.has_more()) page.text(run.run().name + ": " + run.status());
  page.append(runs_page(reported));
  return page;
}

}  // namespace kiln
