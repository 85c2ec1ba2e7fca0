// Any bytes as the folder of a training run: its checkpoints are listed and checked, its log and evaluations
// are read for a report, and the log is opened as a resume does.
#include "checkpoint/train_state.h"
#include "core/json.h"
#include "fuzz/cut_folder.h"
#include "watch/reported_run.h"
#include "watch/run_log.h"

namespace {

// What a reader refuses; values of another kind than expected are JSON's own exceptions, which main() prints.
template <class Read>
void try_to(const Read& read) {
  try {
    read();
  } catch (const kiln::Error&) {
  } catch (const nlohmann::json::exception&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr const char* kNames[] = {"log.jsonl",
                                    "evaluations.jsonl",
                                    "checkpoints/step-00000002/train_state.json",
                                    "checkpoints/step-00000002/model.safetensors",
                                    "checkpoints/step-00000004/train_state.json",
                                    "checkpoints/step-00000004/model.safetensors",
                                    "checkpoints/step-00000004/ema.safetensors"};
  const kiln::test::CutFolder folder(kNames, data, size);
  const std::string run = folder.name();
  try_to([&] {
    for (const kiln::Checkpoint& checkpoint : kiln::list_checkpoints(run)) {
      kiln::read_train_state(checkpoint.folder);
      kiln::read_file_list(checkpoint.folder);
    }
  });
  try_to([&] { kiln::damaged_checkpoints(run); });
  try_to([&] {
    kiln::newest_checked_file(run, [](const std::string& found) { return found + "/" + kiln::kModelFile; });
  });
  try_to([&] {
    const kiln::ReportedRun read = kiln::read_reported_run(run);
    const volatile size_t sink = kiln::smoothed(kiln::points_of(read.steps, "loss")).size();
    static_cast<void>(sink);
  });
  try_to([&] { kiln::RunLog(run, /*from_step=*/2).append({{"step", 3}}); });
  return 0;
}
