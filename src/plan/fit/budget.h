// `kiln train --memory-budget` and its pre-flight: memory choices that fit a budget, and the refusal of what
// does not fit the machine, before anything is allocated.
#pragma once
#include <string>

#include "core/json.h"
#include "parallel/ranks/process_group.h"
#include "plan/run/plan.h"

namespace kiln {

struct FittedRun {
  TrainOptions options;                // with the memory choices made
  nlohmann::json predicted = nullptr;  // figures of the plan; null if this device has no profile
  std::string summary;  // one line on the choice and what it costs; empty if nothing was chosen
  std::string speed{};  // what slows this machine now, as the plan saw it; empty: nothing, or not planned
  // This process gives freed memory back to the system at once (core/memory_limits.h). It does so on a CPU if
  // the budget, or what is free, has no room for about twice its tensors.
  bool gives_memory_back = false;
  // Without a budget: what the run needs, and what is free for it. 0: not planned, or kept to a budget.
  int64_t needed_bytes = 0, free_bytes = 0;
  int64_t rows = 0;  // images of one pass on one rank
};
// Says how much of the memory a run takes, in lines for people. Above 85 % there is a warning that says what
// takes less. Both are empty for a run that was not planned or keeps to a budget.
struct MemoryShare {
  std::string text, warning;
};
MemoryShare memory_share(const FittedRun& run, const SettingText& change = option_on_command_line);

// Terms of a fit that are not options of the run.
struct FitTerms {
  bool may_choose_micro_batch = false;  // if the whole batch does not fit in one pass
  int64_t host_bytes = 0;  // that this process and the ranks beside it may take; 0: all that is available
  int64_t cpu_share = 0;   // processors of this rank (parallel/cpu_share.h); 0: all that the process may use
  SettingText change = option_on_command_line;  // how a refusal says that an option gets a value
};

// Makes the memory choices with the fewest recomputed FLOPs within --memory-budget. A budget of auto is what
// is free on the device, or on a CPU what the machine has available. With --micro-batch -1 it also chooses
// the micro-batch with the fastest step. Without a budget the options stay, and are refused if they do not
// fit in what is free (with --no-preflight not even then). On a GPU, --checkpoint-copy auto makes copies in
// memory only if the host has that much. On a CPU the budget is of resident memory: tensors, the loader's
// arrays and the process itself, shared by the ranks of a machine. Throws Error that ends in the nearest
// command that fits, if there is one. `ranks`: those of the run, this one among them.
FittedRun fit_run(const TrainOptions& options, const Ranks& ranks = {}, const FitTerms& terms = {});
// Makes the choices of --memory-budget for `gpus` devices of a machine that is only planned for. A budget of
// auto is all memory of such a GPU, or what is free on this CPU. REQUIRES: a budget is given. Throws Error as
// fit_run() does.
FittedRun fit_planned(const TrainOptions& options, const MachineProfile& machine, int64_t gpus,
                      const SettingText& change = option_on_command_line);
// Does the same for several ranks: rank 0 decides for all. A collective.
FittedRun fit_run(const TrainOptions& options, ProcessGroup& group, FitTerms terms = {});

// Returns the --checkpoint-copy for ranks with `host_bytes` of host memory each: the plan's own if that fits,
// page-cache if auto would copy too much. Throws Error if neither fits.
CheckpointCopy fitted_checkpoint_copy(const Plan& plan, int64_t host_bytes);

}  // namespace kiln
