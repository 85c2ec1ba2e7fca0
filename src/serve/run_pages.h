// What the pages of served runs show beyond a report: what one may ask of a run, and where its time goes.
#pragma once
#include <string>
#include <vector>

#include "core/page/page.h"
#include "serve/live_run.h"
#include "serve/playground.h"

namespace kiln {

struct RunPageOptions {
  bool has_overview = false;  // of several runs, above this page
  bool is_read_only = false;
};
// Returns the page of a run: its report with buttons, the playground and its drawings ahead.
Page live_page(const LiveRun& run, const std::vector<Playground::Drawing>& drawings,
               const RunPageOptions& options);

// Returns the page of several runs, with the way to each. `runs` are below it, by their numbers ("0/").
Page overview_page(const std::vector<LiveRun>& runs);

}  // namespace kiln
