#include "serve/site.h"

#include <algorithm>
#include <map>
#include <thread>

#include "core/error.h"
#include "core/text/json_text.h"
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

Site::Site(const ServeOptions& options) : options_(options), playground_(options.device, options.threads) {
  std::map<std::string, int> counts;
  for (const std::string& folder : options_.runs) {
    ++counts[runs_.emplace_back(folder).run().name];
    pages_.push_back(std::make_unique<PageFeed>());
  }
  for (LiveRun& run : runs_)  // runs whose folders share a name are named by their paths, as given
    if (counts[run.run().name] > 1) run.rename(run.run().folder);
}

bool Site::update() {
  std::vector<char> has_changed(runs_.size());
  read_runs(has_changed);
  const bool has_drawn = playground_.take_change();
  const RunPageOptions shown{.has_overview = num_runs() > 1, .is_read_only = is_read_only()};
  for (size_t i = 0; i < runs_.size(); ++i) {
    const LiveRun& run = runs_[i];
    if (has_changed[i] != 0 || has_drawn)
      pages_[i]->publish(
          page_or_problem(run.run().name, [&] { return live_page(run, playground_.drawings(i), shown); }),
          run.pictures());
  }
  if (std::ranges::find(has_changed, 1) != has_changed.end())
    overview_.publish(page_or_problem("Runs", [&] { return overview_page(runs_); }));
  return std::ranges::any_of(runs_, &LiveRun::has_more);
}

// Reads the runs by several threads, since logs may be long at the beginning.
void Site::read_runs(std::vector<char>& has_changed) {
  const size_t num_threads = std::clamp<size_t>(std::thread::hardware_concurrency(), 1, runs_.size());
  std::vector<std::jthread> threads;
  for (size_t thread = 0; thread < num_threads; ++thread)
    threads.emplace_back([&, thread] {
      for (size_t i = thread; i < runs_.size(); i += num_threads) has_changed[i] = runs_[i].update() ? 1 : 0;
    });
}

std::string Site::ask(size_t run, const std::string& request) {
  ask_run(options_.runs[run], request);
  return fmt::format("asked for: {}; it is served between steps while the run trains", request);
}

std::string Site::draw(size_t run, const std::string& fields) {
  playground_.begin(run, options_.runs[run], parse_json("serve", fields, "what to draw"));
  return "drawing; what comes of it appears below";
}

std::shared_ptr<const std::string> Site::drawn(size_t run, const std::string& name) const {
  for (const Playground::Drawing& drawing : playground_.drawings(run))
    if (name == std::to_string(drawing.id) + ".png") return drawing.png;
  return nullptr;
}

}  // namespace kiln
