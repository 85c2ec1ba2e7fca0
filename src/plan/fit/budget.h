// `kiln train --memory-budget` and its pre-flight: memory choices that fit a budget, and the refusal of what
// does not fit the machine, before anything is allocated.
#pragma once
#include <string>

#include <nlohmann/json.hpp>
#include "parallel/ranks/process_group.h"

#include "plan/run/plan.h"

namespace kiln {

struct FittedRun {
  TrainOptions options;                // memory choices made
  nlohmann::json predicted = nullptr;  // figures of their plan; null when this device has no profile
  std::string summary;                 // one line on the choice and what it costs; empty without a budget
  // This process gives freed memory back to the system at once (core/heap.h): on a CPU where there is not
  // room for about twice its tensors, in the budget or in what is free.
  bool gives_memory_back = false;
  // Without a budget: what the run needs of what is free for it. 0: not planned, or kept to a budget.
  int64_t needed_bytes = 0, free_bytes = 0;
  int64_t rows = 0;  // images of one of its passes, on one rank
};
// How much of the memory a run takes, as lines for people: the second one only where it is more than 85 %,
// with what takes less. Empty for a run that was not planned or keeps to a budget.
struct MemoryShare {
  std::string text, warning;
};
MemoryShare memory_share(const FittedRun& run, const SettingText& change = option_on_command_line);

// What is not an option of the run.
struct FitTerms {
  bool may_choose_micro_batch = false;  // where the whole batch in one pass does not fit
  int64_t host_bytes = 0;  // that this process and the ranks beside it may take; 0: what the machine has
  int64_t cpu_share = 0;   // processors of this rank (parallel/cpu_share.h); 0: all that the process may use
  SettingText change = option_on_command_line;  // how a refusal says that an option gets a value
};

// Applies --memory-budget (auto: what is free on the device, on a CPU what the machine has available) by the
// fewest recomputed FLOPs; with --micro-batch -1 by the micro-batch, too, whose step is the fastest. Without
// a budget the options stay, and are refused where they do not fit that
// (--no-preflight: not even then). Behind a GPU the copies of --checkpoint-copy auto are made in memory only
// where the host has that much. On a CPU the budget is of resident memory: tensors, the loader's arrays and
// the process itself, shared by the ranks of a machine. Throws Error that ends in the nearest command that
// fits, when there is one. `ranks`: of the run, this one among them.
FittedRun fit_run(const TrainOptions& options, const Ranks& ranks = {}, const FitTerms& terms = {});
// What --memory-budget chooses, or refuses, on `gpus` devices of a machine that is only planned for. auto:
// what a device of it has. REQUIRES: a budget is given. Throws Error as fit_run does.
FittedRun fit_planned(const TrainOptions& options, const MachineProfile& machine, int64_t gpus,
                      const SettingText& change = option_on_command_line);
// The same for several ranks: rank 0 decides for all. A collective.
FittedRun fit_run(const TrainOptions& options, ProcessGroup& group, FitTerms terms = {});

// --checkpoint-copy of a run whose ranks have so much host memory each: the plan's own where that fits,
// page-cache where auto would copy too much. Throws Error when neither does.
CheckpointCopy fitted_checkpoint_copy(const Plan& plan, int64_t host_bytes);

}  // namespace kiln
