#include "train/run_checkpoints.h"

#include <ATen/Parallel.h>

#include <filesystem>
#include <system_error>

#include "core/error.h"
#include "parallel/machine.h"
#include "train/checkpoints.h"
#include "train/newest_checkpoint.h"
#include "train/report.h"
#include "train/run_checks.h"

namespace kiln {

namespace fs = std::filesystem;

void RunCheckpoints::open_folder() {
  const std::string& out = run_.options.out;
  if (run_.is_first()) {
    std::error_code error;
    fs::create_directories(fs::path(out) / "checkpoints", error);
    if (error) fail("train", "cannot create --out {}: {}", out, error.message());
    lock_.emplace("train", out + "/.lock",
                  fmt::format("{} is being written by another kiln train: wait for its end, end it, or give "
                              "another --out",
                              out));
  }
  const auto [newest, damaged] = newest_checkpoint(out, *run_.group);
  if (run_.is_first()) {
    for (const std::string& damage : damaged) run_.warn("passed over, it is damaged: " + damage);
    if (newest)
      for (const std::string& line : resume_warnings(run_.options, read_train_state(newest->folder), info()))
        run_.warn(line);
    prune_checkpoints(out, /*keep=*/0);
  }
  run_.group->barrier("the run folder");
  if (newest) resumed_from_ = newest->folder;
}

std::optional<TrainStateInfo> RunCheckpoints::restore() {
  std::optional<TrainStateInfo> saved;
  const Training& training = run_.training;
  if (!resumed_from_.empty()) {
    const PhaseMemory::Phase phase(run_.phase_memory, "resume");
    saved = load_checkpoint(resumed_from_, *training.state, *training.optimizer);
    progress_.step = last_saved_ = saved->step;
    progress_.bad_steps = saved->bad_steps;
    progress_.resume(saved->train_seconds);
    run_.batches->seek(saved->images_seen);
  }
  const CheckpointCopy copy =
      checkpoint_copy_of(run_.options.checkpoint_copy, run_.device, training.state->placement);
  saver_ = std::make_unique<CheckpointSaver>(run_.options.out, *training.state, *training.optimizer, copy);
  return saved;
}

void RunCheckpoints::begin(RunWatch& watch) {
  const PhaseMemory::Phase phase(run_.phase_memory, "checkpoint");
  finish(watch);
  const RunWatch::Pause pause(watch);
  TrainStateInfo state = info();
  state.log_window = watch.window();
  saver_->begin(std::move(state));
  last_saved_ = progress_.step;
}

void RunCheckpoints::poll(RunWatch& watch) { complete(saver_->poll(), watch); }

void RunCheckpoints::finish(RunWatch& watch) {
  if (saver_ && saver_->under_way()) complete(saver_->finish(), watch);
}

// One is on the disk, in `folder`; none: nothing has happened.
void RunCheckpoints::complete(const std::optional<std::string>& folder, RunWatch& watch) {
  if (!folder || !run_.is_first()) return;
  const RunWatch::Pause pause(watch);
  prune_checkpoints(run_.options.out, run_.options.keep_checkpoints);
  fmt::print("checkpoint {}\n", *folder);
  write_report(run_.options.out);
}

TrainStateInfo RunCheckpoints::info() const {
  return {.seed = run_.options.seed,
          .step = progress_.step,
          .images_seen = progress_.step * run_.options.global_batch,
          .bad_steps = progress_.bad_steps,
          .train_seconds = progress_.seconds(),
          .num_threads = at::get_num_threads(),
          .world_size = run_.group->world_size(),
          .machine = machine_name(run_.device),
          .config = run_.config};
}

}  // namespace kiln
