#include "serve/site.h"

#include <algorithm>
#include <map>
#include <thread>

#include "core/error.h"
#include "core/text/json_text.h"
#include "core/threads/pieces.h"
#include "serve/run_pages.h"
#include "watch/run_requests.h"

namespace kiln {

namespace {

// What a stranger wrote into a run's files may not be what a report expects.
template <class Make>
Page page_or_problem(const std::string& title, const Make& make) try {
  return make();
} catch (const std::exception& error) {
  Page page(title);
  page.text("The page cannot be drawn: " + message_of(error), "finding");
  return page;
}

}  // namespace

Site::Site(const ServeOptions& options)
    : options_(options),
      runs_(options.runs.begin(), options.runs.end()),
      pages_(runs_.size()),
      playground_(options.device, options.threads) {
  std::map<std::string, int> counts;
  for (const LiveRun& run : runs_) ++counts[run.run().name];
  for (LiveRun& run : runs_)  // runs whose folders share a name are named by their paths, as given
    if (counts[run.run().name] > 1) run.rename(run.run().folder);
}

bool Site::update() {
  // Several threads read, since logs may be long at the beginning.
  std::vector<char> has_changed(runs_.size());
  run_pieces(num_runs(), std::min<int64_t>(std::thread::hardware_concurrency(), num_runs()),
             [&](int64_t i) { has_changed[i] = runs_[i].update(); });
  const bool has_drawn = playground_.take_change();
  const RunPageOptions shown{.has_overview = num_runs() > 1, .is_read_only = is_read_only()};
  for (size_t i = 0; i < runs_.size(); ++i)
    if (const LiveRun& run = runs_[i]; has_changed[i] != 0 || has_drawn)
      pages_[i].publish(
          page_or_problem(run.run().name, [&] { return live_page(run, playground_.drawings(i), shown); }),
          run.pictures());
  if (std::ranges::find(has_changed, 1) != has_changed.end())
    overview_.publish(page_or_problem("Runs", [&] { return overview_page(runs_); }));
  return std::ranges::any_of(runs_, &LiveRun::has_more);
}

std::string Site::ask(int64_t run, const std::string& request) {
  ask_run(options_.runs[run], request);
  return fmt::format("asked for: {}; it is served between steps while the run trains", request);
}

std::string Site::draw(int64_t run, const std::string& fields) {
  playground_.begin(run, options_.runs[run], parse_json("serve", fields, "what to draw"));
  return "drawing; what comes of it appears below";
}

std::shared_ptr<const std::string> Site::drawn(int64_t run, const std::string& name) const {
  for (const Playground::Drawing& drawing : playground_.drawings(run))
    if (name == std::to_string(drawing.id) + ".png") return drawing.png;
  return nullptr;
}

}  // namespace kiln
