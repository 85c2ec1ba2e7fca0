#include "train/resume.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "checkpoint/train_state.h"
#include "core/error.h"
#include "core/json.h"
#include "core/text/some_of.h"
#include "core/threads/parallel_pieces.h"
#include "parallel/ranks/agreement.h"
#include "run/option_values.h"
#include "run/stage_options.h"

namespace kiln {

namespace {

// Returns where part `index` of `count` equal parts of [begin, end) begins.
uint64_t part_begin(uint64_t begin, uint64_t end, int64_t index, int64_t count) {
  const auto part = static_cast<uint64_t>(index), parts = static_cast<uint64_t>(count);
  const uint64_t bytes = end - begin;
  return begin + bytes / parts * part + std::min(part, bytes % parts);
}

// Hashes this rank's share of a file with all its threads. Ranks may have different numbers of threads.
FileChecksum checksum_of_share(const std::string& path, uint64_t bytes, const ProcessGroup& group) {
  const uint64_t begin = part_begin(0, bytes, group.rank(), group.world_size()),
                 end = part_begin(0, bytes, group.rank() + 1, group.world_size());
  const int64_t threads = at::get_num_threads();
  std::vector<FileChecksum> parts(static_cast<size_t>(threads));
  parallel_pieces(threads, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i)
      parts[static_cast<size_t>(i)] =
          checksum_of_bytes(path, part_begin(begin, end, i, threads), part_begin(begin, end, i + 1, threads));
  });
  FileChecksum share;
  for (const FileChecksum& part : parts) share.merge(part);
  return share;
}

// Returns what is wrong with the bytes of a complete checkpoint, or "". Each rank reads a part, and all get
// the same answer. A collective.
std::string damage_of_bytes(const std::string& folder, ProcessGroup& group) {
  std::vector<CheckpointFile> files;
  agree(group, "the newest checkpoint", [&] { files = read_file_list(folder); });
  std::erase_if(files, [](const CheckpointFile& file) { return file.checksum.empty(); });
  if (files.empty()) return "";
  // A file that cannot be read is not damaged: another rank, or a later start, may be able to read it.
  nlohmann::json mine = nlohmann::json::array();
  agree(group, "the newest checkpoint", [&] {
    for (const CheckpointFile& file : files)
      mine.push_back(checksum_of_share(folder + "/" + file.name, file.bytes, group));
  });
  std::vector<FileChecksum> found(files.size());
  for (const std::string& text : group.gather(mine.dump(), "the bytes of a checkpoint")) {
    const auto of_rank = nlohmann::json::parse(text);
    for (size_t file = 0; file < files.size(); ++file)
      found[file].merge(of_rank.at(file).get<FileChecksum>());
  }
  for (size_t file = 0; file < files.size(); ++file)
    if (std::string damage = damage_of(folder, files[file], found[file]); !damage.empty()) return damage;
  return "";
}

// Lists the complete checkpoints that rank 0 sees, newest first. A collective.
std::vector<Checkpoint> complete_checkpoints(const std::string& run, ProcessGroup& group) {
  nlohmann::json seen = nlohmann::json::array();
  agree(group, "the checkpoints", [&] {
    if (group.rank() != 0) return;
    for (const Checkpoint& checkpoint : list_checkpoints(run))
      seen.push_back(nlohmann::json::array({checkpoint.step, checkpoint.folder}));
  });
  seen = nlohmann::json::parse(group.gather(seen.dump(), "the checkpoints").front());
  std::vector<Checkpoint> checkpoints;
  for (const nlohmann::json& entry : seen)
    checkpoints.push_back({.step = entry.at(0), .folder = entry.at(1).get<std::string>()});
  std::ranges::reverse(checkpoints);
  return checkpoints;
}

}  // namespace

NewestCheckpoint newest_checkpoint(const std::string& run, ProcessGroup& group) {
  NewestCheckpoint newest;
  std::vector<Checkpoint> damaged;
  std::vector<std::string> damages;  // of `damaged`
  for (const Checkpoint& checkpoint : complete_checkpoints(run, group)) {
    std::string damage = damage_of_bytes(checkpoint.folder, group);
    if (damage.empty()) {
      newest.checkpoint = checkpoint;
      break;
    }
    damaged.push_back(checkpoint);
    damages.push_back(std::move(damage));
  }
  agree(group, "the newest checkpoint", [&] {
    if (group.rank() != 0) return;
    newest.damaged = damaged_checkpoints(run);
    // Damaged checkpoints are set aside only if training goes on. A newer one would be counted as one to
    // keep.
    for (size_t i = 0; i < damaged.size(); ++i)
      newest.damaged.push_back(newest.checkpoint
                                   ? fmt::format("{}: it is {} now", damages[i], set_aside(damaged[i]))
                                   : damages[i]);
    if (newest.checkpoint || newest.damaged.empty()) return;
    fail("resume",
         "none of the {} checkpoints of {} is whole: {}: restore one, or remove {}/checkpoints to "
         "start again from step 0",
         newest.damaged.size(), run, some_of(newest.damaged, "; "), run);
  });
  return newest;
}

namespace {

// True if a stage of --continue-with may set every one of these changes ("--lr (0.0001 -> 0.0002)").
bool may_follow(const std::vector<std::string>& changes) {
  const std::vector<std::string>& names = stage_option_names();
  return std::ranges::all_of(changes, [&](const std::string& change) {
    return std::ranges::find(names, change.substr(2, change.find(' ') - 2)) != names.end();
  });
}

// Returns what to do about other data than a run had.
std::string remedy_of(const TrainOptions& options, const TrainingData& data, int64_t first_step) {
  if (!data.pictures.images) return "give the store that it was trained on, or another --out";
  const std::string other = data.pictures.images->first_unrecorded(options.out, first_step);
  return (other.empty() ? "some pictures are missing"
                        : fmt::format("{} is new or has another size or label", other)) +
         ": put the earlier pictures there, go on with --continue-with FILE, or give another --out";
}

// Refuses to go on from a checkpoint with other settings or on other data. Returns what makes further bits or
// the schedule differ from those of an uninterrupted run, one line each.
std::vector<std::string> resume_warnings(const TrainOptions& options, const TrainingData& data,
                                         int64_t first_step, const TrainStateInfo& saved,
                                         const TrainStateInfo& now, bool begins_stage) {
  nlohmann::json saved_options = saved.config.at("options");
  const nlohmann::json& options_now = now.config.at("options");
  if (begins_stage) {  // train/stages/stages.h has checked these
    saved_options.update(stage_settings(options));
    for (const char* name : {"max-steps", "model-config"}) saved_options[name] = options_now.at(name);
  }
  // The base of an adapter is compared by its content: its file may have been moved. Runs of earlier versions
  // know no null rows.
  const std::string base_then = saved.config.value("base", ""), base_now = now.config.value("base", "");
  if (!base_then.empty() && !base_now.empty()) {
    if (!base_now.starts_with(base_then))
      fail("resume",
           "{} trains an adapter of other weights than --weights {} holds now: put them back, or give "
           "another --out",
           options.out, options.model.weights);
    saved_options["weights"] = options_now.at("weights");
  }
  const OptionChanges changes = compare_options(saved_options, options_now);
  if (!changes.refused.empty())
    fail("resume", "{} holds a run with other settings: {}; go back to them, or give {}another --out",
         options.out, some_of(changes.refused),
         may_follow(changes.refused) ? "the new ones with --continue-with FILE, or " : "");
  const auto data_then = saved.config.at("data").get<std::string>();
  const bool is_same = begins_stage || data_then == data.identity;
  const bool is_of_earlier_version =
      !is_same && data.earlier_identity && data_then == data.earlier_identity();
  if (!is_same && !is_of_earlier_version)
    fail("resume", "{} was trained on other data ({:.80}) than --data {} ({:.80}): {}", options.out,
         data_then, options.data.path, data.identity, remedy_of(options, data, first_step));

  std::vector<std::string> lines;
  if (is_of_earlier_version)
    lines.push_back(
        fmt::format("an earlier version began {} and kept no sizes of its pictures, which are compared from "
                    "here on",
                    options.out));
  if (!changes.warned.empty())
    lines.push_back(fmt::format("resuming with {}: further bits differ from those of an uninterrupted run",
                                some_of(changes.warned)));
  for (const char* end : {"max-steps", "max-minutes"})
    if (options.lr.shape != LrShape::kConstant && saved_options.at(end) != options_now.at(end))
      lines.push_back(fmt::format(
          "--{} {} instead of {} moves the end of the {} schedule: the learning rate jumps here", end,
          options_now.at(end).dump(), saved_options.at(end).dump(), choice_name(options.lr.shape)));
  if (saved.world_size != now.world_size)
    lines.push_back(fmt::format("resuming on {} ranks a run of {}: sums over ranks round differently",
                                now.world_size, saved.world_size));
  if (saved.machine != now.machine || saved.num_threads != now.num_threads)
    lines.push_back(
        fmt::format("resuming on {} with {} threads a run of {} with {} threads: further bits differ "
                    "from those of an uninterrupted run",
                    now.machine, now.num_threads, saved.machine, saved.num_threads));
  return lines;
}

}  // namespace

RunFolder open_run_folder(const TrainingRun& run, const TrainStateInfo& now, const StagePlan& plan) {
  const std::string& out = run.options.out;
  RunFolder folder;
  if (run.is_first()) {
    if (is_store(out)) fail("train", "--out {} is a feature store: give a folder of its own to the run", out);
    std::error_code error;
    std::filesystem::create_directories(std::filesystem::path(out) / "checkpoints", error);
    if (error) fail("train", "cannot create --out {}: {}", out, error.message());
    folder.lock = std::make_unique<FileLock>(
        "train", out + "/.lock",
        fmt::format("{} is being written by another kiln train: wait for its end, end it, or give another "
                    "--out",
                    out));
  }
  const auto [newest, damaged] = newest_checkpoint(out, *run.group);
  if (run.is_first()) {
    for (const std::string& damage : damaged) run.warn("passed over, it is damaged: " + damage);
    // The checkpoint that ends a stage has other settings than the stage that begins there.
    const bool begins_stage = plan.step == plan.stage().first_step;
    if (newest && newest->step == plan.step)
      for (const std::string& line : resume_warnings(run.options, run.data, run.first_step,
                                                     read_train_state(newest->folder), now, begins_stage))
        run.warn(line);
    prune_checkpoints(out, /*keep=*/0);
  }
  run.group->barrier("the run folder");
  if (newest) folder.checkpoint = newest->folder;
  if (newest) folder.step = newest->step;
  return folder;
}

}  // namespace kiln
