// The runs that are served, their pages, and what may be done with them.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "serve/live_run.h"
#include "serve/page_feed.h"
#include "serve/playground.h"

namespace kiln {

struct ServeOptions {
  std::vector<std::string> runs{};
  int64_t port = 8765;         // of 127.0.0.1; 0: a free one
  bool is_read_only = false;   // no requests, no playground
  std::string device = "cpu";  // of the playground, as kiln sample has it
  int64_t threads = 1;         // likewise
};

class Site {
 public:
  explicit Site(const ServeOptions& options);

  // Reads what is new of all runs and publishes the pages that change by it. Returns whether more is to be
  // read at once. Called by one thread; everything else may be called by any.
  bool update();

  int64_t num_runs() const { return std::ssize(runs_); }
  bool is_read_only() const { return options_.is_read_only; }
  const PageFeed& page_of(int64_t run) const { return pages_[run]; }
  const PageFeed& overview() const { return overview_; }
  // Makes a request of a run, or begins to draw. Return what to say of it. Throw Error.
  std::string ask(int64_t run, const std::string& request);
  std::string draw(int64_t run, const std::string& fields);
  // Returns the picture of this name ("1.png") among the drawings of a run, or nothing.
  std::shared_ptr<const std::string> drawn(int64_t run, const std::string& name) const;

 private:
  const ServeOptions options_;
  std::vector<LiveRun> runs_;
  std::vector<PageFeed> pages_;
  PageFeed overview_;
  Playground playground_;
};

}  // namespace kiln
