#include "serve/run_pages.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <span>

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
    times.taken += std::fmax(0, number(line, "taken_share")) / count;
  }
  return times;
}

std::string share_text(double share) { return fmt::format("{:.1f} %", 100 * share); }

// Adds buttons: a name, where it sends to, and the texts that it sends, each with its key, label and value.
void add_buttons(Page& page, const ReportedRun& run) {
  const Json nothing = Json::array();
  page.section("Ask the run");
  page.part("forms", {{"items",
                       {{"Checkpoint now", "requests/checkpoint", nothing},
                        {"Sample now", "requests/sample", nothing},
                        {"Stop", "requests/stop", nothing}}}});
  if (!run.saved) return;
  const Json what = run.record.contains("text") ? Json{"prompt", "prompt", ""}
                                                : Json{"classes", "classes, by number or name", ""};
  const Json fields = {what,
                       {"seed", "seed", "0"},
                       {"guidance", "guidance", ""},
                       {"steps", "steps", ""},
                       {"images", "pictures", "1"}};  // of Playground::begin()
  page.section("Draw from the newest checkpoint");
  page.part("forms", {{"items", Json::array({Json::array({"Draw", "draw", fields})})}});
}

// Adds tables of what kept the steps of a run from computing, if anything did: by cause, over the whole run
// and over its newest tenth.
void add_stalls(Page& page, const ReportedRun& run) {
  const std::span<const Json> lines = run.steps;
  StepTimes whole = mean_times(lines), newest = mean_times(lines.last((lines.size() + 9) / 10));
  page.section("Stalls by cause");
  std::vector<std::vector<std::string>> rows;
  for (const auto& [group, cause] : kCauses)
    if (const double seconds = whole.of_group[group]; seconds > 0)
      rows.push_back({cause, fmt::format("{:.3g} ms", 1e3 * seconds), share_text(seconds / whole.all),
                      newest.all > 0 ? share_text(newest.of_group[group] / newest.all) : "-"});
  if (whole.taken > 0)
    page.text(fmt::format("Other programs had {} of the processors' time, {} in the newest tenth of the run.",
                          share_text(whole.taken), share_text(newest.taken)));
  page.table({"cause", "a step", "of the time", "of the newest tenth"}, rows, "Within steps");
  std::vector<std::vector<std::string>> between;
  for (const char* event : {"validation", "evaluation", "skipped"}) {
    double seconds = 0;
    int64_t count = 0;
    for (const Json& line : run.log)
      if (line.value("event", Json()) == event) {
        seconds += std::fmax(0, number(line, "seconds"));
        ++count;
      }
    if (count > 0)
      between.push_back({event, std::to_string(count), seconds > 0 ? duration_text(seconds) : "not timed"});
  }
  page.table({"event", "times", "took"}, between, "Between steps");
}

}  // namespace

Page live_page(const LiveRun& live, const std::vector<Playground::Drawing>& drawings,
               const RunPageOptions& options) {
  const ReportedRun& run = live.run();
  Page page(run.name);
  if (options.has_overview) page.part("links", {{"items", Json::array({Json::array({"all runs", "../"})})}});
  page.text(live.status());
  if (!options.is_read_only) {
    add_buttons(page, run);
    page.section("Drawn");
    for (const Playground::Drawing& drawing : drawings)
      if (drawing.png)
        page.picture(fmt::format("draws/{}.png", drawing.id), drawing.text);
      else
        page.text(drawing.text);
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
