// Checkpoint folders of a run: RUN/checkpoints/step-00001000/ with model.safetensors, ema*.safetensors,
// train_state.json and the optimizer's train_state-00000-of-00001.safetensors. Torch-free.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/file_checksum.h"
#include "core/json.h"

namespace kiln {

// train_state.json: where a run stands. The position in the data is images_seen alone, whatever the rank
// count.
struct TrainStateInfo {
  uint64_t seed = 0;
  int64_t step = 0;  // global batches consumed
  int64_t images_seen = 0;
  int64_t updates = 0;  // applied optimizer updates: step less the skipped ones
  double loss_scale = 1;
  int64_t scaler_good_steps = 0;
  int64_t scaler_overflows = 0;  // that have not changed the loss scale
  int64_t bad_steps = 0;         // skipped in a row up to here
  double train_seconds = 0;      // spent in training so far: time limits go on counting after a resume
  int num_threads = 0;
  int64_t world_size = 1;       // ranks that trained
  std::string machine{};        // processor or GPU; the same bits are promised on the same one only
  nlohmann::json log_window{};  // losses of steps since the last line of the log
  nlohmann::json config{};      // the options of the run
};

// "step-00001000"
std::string checkpoint_name(int64_t step);
// Returns nothing for other names.
std::optional<int64_t> step_of_checkpoint(const std::string& name);
inline constexpr const char* kModelFile = "model.safetensors";
inline constexpr const char* kHeadFile = "head.safetensors";  // of a loss with weights of its own
// One file for any number of ranks.
inline constexpr const char* kOptimizerFile = "train_state-00000-of-00001.safetensors";
// "ema.safetensors" for the first decay, "ema-<decay>.safetensors" for further ones.
std::string ema_file_name(const std::vector<double>& decays, size_t index);
// Return RUN/checkpoints/step-00001000, and where its files are until it is complete.
std::string checkpoint_folder(const std::string& run, int64_t step);
std::string partial_checkpoint_folder(const std::string& run, int64_t step);

struct Checkpoint {
  int64_t step = 0;
  std::string folder;
};
// Returns the complete checkpoints of RUN, oldest first. Complete means that train_state.json is as it was
// written and that every file has the size listed there. Torn and foreign folders are passed over. An absent
// folder gives an empty list. newest_checked_file() and damage_of() check the content of the files.
std::vector<Checkpoint> list_checkpoints(const std::string& run);
// Returns what is wrong with each folder that has a checkpoint's name and is not complete: "model.safetensors
// of RUN/checkpoints/step-00001000 has 12 bytes, expected 2048". Kiln itself leaves none, however it ends.
std::vector<std::string> damaged_checkpoints(const std::string& run);
// Throws Error naming the file and what is wrong with it.
TrainStateInfo read_train_state(const std::string& checkpoint_folder);

// A file of a checkpoint, as train_state.json describes it.
struct CheckpointFile {
  std::string name;
  uint64_t bytes = 0;
  std::string checksum;  // FileChecksum::of_file(); empty in older checkpoints
};
// Lists all files but train_state.json. Throws Error as read_train_state() does.
std::vector<CheckpointFile> read_file_list(const std::string& checkpoint_folder);

// A checkpoint in the making: a hidden folder beside the others that takes its final name in one rename when
// all of it is on disk. Destroyed without commit(), it leaves nothing behind.
class CheckpointWriter {
 public:
  // Throws Error if there is no permission or the disk is full.
  CheckpointWriter(const std::string& run, int64_t step);
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;

  const std::string& folder() const { return partial_; }  // where the files are to be written
  // Writes train_state.json with the sizes of all files and the checksums of those in `checksums`, by name;
  // syncs and renames. A checkpoint of the same step is replaced. Returns the final folder. REQUIRES: all
  // bytes of those files are in their checksums.
  std::string commit(const TrainStateInfo& info, const std::map<std::string, FileChecksum>& checksums = {});

 private:
  std::string final_, partial_;
  bool committed_ = false;
};

// Renames a complete checkpoint whose bytes are damaged, so that it does not count as a checkpoint any more.
// Returns its new folder. Throws Error.
std::string set_aside(const Checkpoint& checkpoint);

// Removes all but the newest `keep` complete checkpoints (0 = keeps all), and what interrupted writers left.
void prune_checkpoints(const std::string& run, int64_t keep);

// Checks that a checkpoint's files hold the bytes that were written.
//
// Returns what is wrong with a file whose bytes have the checksum `found`: "model.safetensors of
// RUN/checkpoints/step-00001000 has other bytes than were written". Empty if nothing is wrong, or if the
// checkpoint is too old to have checksums.
std::string damage_of(const std::string& checkpoint_folder, const CheckpointFile& file,
                      const FileChecksum& found);

// Returns the file that `choose` names in the newest complete checkpoint in which that file is as it was
// written, or if no checkpoint is complete, in the newest of which only some files
// were copied. Empty if there are no checkpoints yet. Damaged checkpoints that it passes over are reported on
// stderr. For readers of one file, which this reads as a whole. Throws Error if a file cannot be read or all
// checkpoints are damaged.
std::string newest_checked_file(const std::string& run,
                                const std::function<std::string(const std::string& folder)>& choose);

}  // namespace kiln
