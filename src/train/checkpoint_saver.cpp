#include "train/checkpoint_saver.h"

#include <span>
#include <utility>

#include "checkpoint/file_parts.h"
#include "core/aten.h"
#include "core/error.h"
#include "parallel/offload/host_copy.h"
#include "parallel/ranks/agreement.h"

namespace kiln {

struct CheckpointSaver::Save {
  TrainStateInfo info;
  std::string folder;                        // of the unfinished files
  std::unique_ptr<CheckpointWriter> writer;  // rank 0's
  std::vector<at::Tensor> memory;            // host copies that are written from
  std::unique_ptr<BackgroundWrite> write;    // declared last, so that it ends first
};

CheckpointCopy checkpoint_copy_of(CheckpointCopy asked, const StatePlacement& placement) {
  if (asked != CheckpointCopy::kAuto) return asked;
  return placement.has_host && placement.optimizer == Placement::kDevice ? CheckpointCopy::kMemory
                                                                         : CheckpointCopy::kPageCache;
}

CheckpointSaver::CheckpointSaver(std::string run, const TrainingState& state, CheckpointCopy copy)
    : run_(std::move(run)), state_(state), copy_(copy), files_(state) {}

CheckpointSaver::~CheckpointSaver() = default;

void CheckpointSaver::begin(TrainStateInfo info) {
  ProcessGroup& group = state_.zero->group();
  info.updates = state_.updates;
  info.loss_scale = state_.loss_scaler.scale();
  info.scaler_good_steps = state_.loss_scaler.good_steps();
  info.scaler_overflows = state_.loss_scaler.overflows();
  info.world_size = group.world_size();
  auto save = std::make_unique<Save>();
  save->folder = partial_checkpoint_folder(run_, info.step);
  agree(group, "the beginning of a checkpoint", [&] {
    if (group.rank() != 0) return;
    save->writer = std::make_unique<CheckpointWriter>(run_, info.step);
    files_.create(save->folder);
  });
  save->info = std::move(info);
  state_.zero->finish_gathers();
  agree(group, "the copy of a checkpoint", [&] { copy_state(*save); });
  save_ = std::move(save);
}

void CheckpointSaver::copy_state(Save& save) const {
  at::NoGradGuard no_grad;
  FileParts files(files_.paths(save.folder));
  const std::vector<std::string> heads = files_.heads();
  if (state_.zero->group().rank() == 0)
    for (size_t file = 0; file < heads.size(); ++file)
      files.write(file, 0, std::as_bytes(std::span(heads[file])));
  std::vector<FilePart> later;
  std::optional<StagedRead> staged;
  files_.visit(state_, [&](const at::Tensor& tensor, const std::vector<TensorPart>& parts) {
    const bool keep = copy_ == CheckpointCopy::kMemory;
    if (!tensor.is_cpu() && !staged) staged.emplace(tensor.device());
    const at::Tensor host = tensor.is_cpu() ? (keep ? tensor.clone() : tensor) : staged->read(tensor);
    const std::span bytes(static_cast<const std::byte*>(host.const_data_ptr()), host.nbytes());
    for (const TensorPart& part : parts) {
      const auto of_part = bytes.subspan(tensor.element_size() * static_cast<size_t>(part.begin),
                                         tensor.element_size() * static_cast<size_t>(part.count));
      if (keep)
        later.push_back({.file = part.file, .offset = part.offset, .bytes = of_part});
      else
        files.write(part.file, part.offset, of_part);
    }
    if (keep) save.memory.push_back(host);
  });
  save.write = std::make_unique<BackgroundWrite>(std::move(files), std::move(later));
}

std::optional<std::string> CheckpointSaver::poll() {
  if (!save_) return std::nullopt;
  ProcessGroup& group = state_.zero->group();
  const bool done = save_->write->done(), failed = done && !save_->write->wait().empty();
  const std::vector<double> of_all = group.sum({done ? 1.0 : 0.0, failed ? 1.0 : 0.0}, "the checkpoint");
  if (of_all[0] < static_cast<double>(group.world_size()) && of_all[1] == 0) return std::nullopt;
  return finish();
}

std::string CheckpointSaver::finish() {
  const std::unique_ptr<Save> save = std::exchange(save_, nullptr);
  ProcessGroup& group = state_.zero->group();
  agree(group, "the parts of a checkpoint", [&] {
    const std::string& error = save->write->wait();
    if (!error.empty()) throw Error(error);
  });
  const auto checksums = files_.checksums(save->write->checksums(), group);
  agree(group, "the end of a checkpoint", [&] {
    if (save->writer) save->writer->commit(save->info, checksums);
  });
  return checkpoint_folder(run_, save->info.step);
}

}  // namespace kiln
