#include "train/checkpoint_files.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <vector>

#include "checkpoint/file_parts.h"
#include "checkpoint/train_state.h"
#include "core/aten.h"
#include "core/error.h"
#include "core/json.h"
#include "core/tensors.h"
#include "models/model.h"
#include "watch/prediction.h"

namespace kiln {

namespace {

// The elements of a unit's shard that this rank writes. Ranks that hold the same shard (all ranks, if nothing
// is divided) write a share of it each.
struct Share {
  int64_t begin = 0, end = 0;
};

Share share_of(const FlatUnit& unit, const ProcessGroup& group) {
  const bool divided = unit.sharding().zero_stage > 0;
  const int64_t num_shards = divided ? unit.sharding().world_size : 1;
  const int64_t copies = group.world_size() / num_shards, copy = group.rank() / num_shards;
  return {.begin = unit.shard_size() * copy / copies, .end = unit.shard_size() * (copy + 1) / copies};
}

// Returns the untrained weights that weights files contain. An adapter's files contain nothing of its base.
std::vector<std::shared_ptr<Parameter>> saved_constants(const TrainingState& state) {
  if (!state.frozen.empty()) return {};
  return state.constants;
}

// How many complete checkpoints stay until the next one is whole.
int64_t num_left(int64_t keep) { return std::max<int64_t>(keep - 1, 1); }

}  // namespace

std::string moment_key(const std::string& moment, const std::string& key) { return moment + "." + key; }

CheckpointFiles::CheckpointFiles(const TrainingState& state) {
  std::vector<TensorSpec> masters, averages, moments, of_head;
  for (const auto& segment : state.segments) {
    const FlatLayout& layout = segment.unit.layout();
    for (size_t i = 0; i < layout.slots.size(); ++i) {
      const std::string& key = layout.slots[i].key;
      (segment.is_head ? of_head : masters)
          .push_back({key, from_scalar_type(segment.unit.master_dtype()), layout.slots[i].shape});
      if (!segment.is_head) averages.push_back({key, Dtype::kF32, layout.slots[i].shape});
      for (const StateBuffer& buffer : segment.unit.moment_buffers())
        if (const StateSlot kept = buffer.slot(layout, i); kept.values > 0)
          moments.push_back({moment_key(buffer.name, key), buffer.dtype, kept.shape});
    }
  }
  for (const auto& constant : saved_constants(state))
    for (auto* weights : {&masters, &averages})
      weights->push_back({constant->key, Dtype::kF32, constant->value.sizes().vec()});
  add(kModelFile, masters);
  for (size_t e = 0; e < state.ema_decays.size(); ++e) add(ema_file_name(state.ema_decays, e), averages);
  add(kOptimizerFile, moments);
  if (!of_head.empty()) add(kHeadFile, of_head);
}

// Tensors are sorted by element size, largest first, then by name. So each tensor is aligned to its elements.
void CheckpointFiles::add(const std::string& name, std::vector<TensorSpec> specs) {
  std::ranges::sort(specs, {}, [](const TensorSpec& spec) {
    return std::pair(-static_cast<int64_t>(dtype_size(spec.dtype)), std::cref(spec.name).get());
  });
  File file{.name = name, .layout = lay_out_safetensors(specs), .offsets = {}};
  for (size_t i = 0; i < specs.size(); ++i) file.offsets[specs[i].name] = file.layout.offsets[i];
  files_.push_back(std::move(file));
}

std::vector<std::string> CheckpointFiles::paths(const std::string& folder) const {
  std::vector<std::string> paths;
  for (const File& file : files_) paths.push_back(folder + "/" + file.name);
  return paths;
}

void CheckpointFiles::create(const std::string& folder) const {
  for (const File& file : files_) create_file_of_parts(folder + "/" + file.name, file.layout.file_bytes);
}

int64_t CheckpointFiles::file_bytes() const {
  int64_t bytes = 0;
  for (const File& file : files_) bytes += static_cast<int64_t>(file.layout.file_bytes);
  return bytes;
}

std::vector<std::string> CheckpointFiles::heads() const {
  std::vector<std::string> heads;
  for (const File& file : files_) heads.push_back(file.layout.head);
  return heads;
}

std::map<std::string, FileChecksum> CheckpointFiles::checksums(const std::vector<FileChecksum>& mine,
                                                               ProcessGroup& group) const {
  std::map<std::string, FileChecksum> all;
  for (const std::string& text : group.gather(nlohmann::json(mine).dump(), "the checksums of a checkpoint")) {
    if (group.rank() != 0) continue;
    const auto of_rank = nlohmann::json::parse(text).get<std::vector<FileChecksum>>();
    for (size_t file = 0; file < files_.size(); ++file) all[files_[file].name].merge(of_rank.at(file));
  }
  return all;
}

void CheckpointFiles::visit(const TrainingState& state, const Visitor& visitor) const {
  const ProcessGroup& group = state.zero->group();
  const size_t moments_file = 1 + state.ema_decays.size(), head_file = moments_file + 1;
  for (size_t s = 0; s < state.segments.size(); ++s) {
    const FlatUnit& unit = state.segments[s].unit;
    const StateLease lease = unit.lease(Access::kRead);
    if (s + 1 < state.segments.size()) state.segments[s + 1].unit.prefetch_state();
    const Share share = share_of(unit, group);
    const int64_t first = unit.shard_offset() + share.begin, last = unit.shard_offset() + share.end;
    // Visits all values that `kept` describes, from the first ones of the share to the last ones.
    const auto visit_buffer = [&](const at::Tensor& buffer, size_t file, const StateBuffer& kept,
                                  bool is_moment) {
      std::vector<TensorPart> parts;
      int64_t from = buffer.numel(), to = 0;
      const std::vector<StateRun> runs =
          state_runs(kept, unit.layout(), unit.shard_offset(), unit.shard_offset() + unit.shard_size());
      for (size_t i = 0; i < runs.size(); ++i) {
        const FlatSlot& slot = unit.layout().slots[i];
        const StateRun run = part_of(runs[i], kept.slot(unit.layout(), i),
                                     std::clamp(first - slot.offset, int64_t{0}, slot.numel),
                                     std::clamp(last - slot.offset, int64_t{0}, slot.numel));
        if (run.count == 0) continue;
        const std::string key = is_moment ? moment_key(kept.name, slot.key) : slot.key;
        parts.push_back({.file = file,
                         .offset = files_[file].offsets.at(key) +
                                   dtype_size(kept.dtype) * static_cast<uint64_t>(run.first),
                         .begin = run.place,
                         .count = run.count});
        from = std::min(from, run.place);
        to = std::max(to, run.place + run.count);
      }
      for (TensorPart& part : parts) part.begin -= from;
      if (!parts.empty()) visitor(buffer.narrow(0, from, to - from), parts);
    };
    visit_buffer(lease.master, state.segments[s].is_head ? head_file : 0,
                 {.name = {}, .dtype = from_scalar_type(unit.master_dtype())}, /*is_moment=*/false);
    for (size_t e = 0; e < lease.emas.size(); ++e)
      visit_buffer(lease.emas[e], 1 + e, {}, /*is_moment=*/false);
    for (size_t m = 0; m < lease.moments.size(); ++m)
      visit_buffer(lease.moments[m], moments_file, unit.moment_buffers()[m], /*is_moment=*/true);
  }
  if (group.rank() != 0) return;
  for (const auto& constant : saved_constants(state)) {
    std::vector<TensorPart> parts;
    for (size_t file = 0; file < moments_file; ++file)
      parts.push_back({.file = file,
                       .offset = files_[file].offsets.at(constant->key),
                       .begin = 0,
                       .count = constant->value.numel()});
    visitor(constant->value.detach().to(at::kFloat).contiguous().view(-1), parts);
  }
}

int64_t available_bytes(const std::string& run) {
  constexpr auto kMost = std::numeric_limits<int64_t>::max();
  std::error_code unknown;
  const std::filesystem::space_info space = std::filesystem::space(run, unknown);
  return unknown || space.available > static_cast<uintmax_t>(kMost) ? kMost
                                                                    : static_cast<int64_t>(space.available);
}

std::string check_space(const CheckpointSpace& space) {
  if (space.num_ahead == 0) return "";
  std::vector<double> saved;  // bytes, oldest first
  double held = 0;
  for (const Checkpoint& checkpoint : list_checkpoints(space.run)) {
    double bytes = 0;
    for (const CheckpointFile& file : read_file_list(checkpoint.folder))
      bytes += static_cast<double>(file.bytes);
    saved.push_back(bytes);
    held += bytes;
  }
  const auto free = static_cast<double>(space.available), each = static_cast<double>(space.bytes);
  double room = free;
  if (space.keep > 0)
    for (int64_t i = 0; i + num_left(space.keep) < std::ssize(saved); ++i)
      room += saved[static_cast<size_t>(i)];
  if (room < each)
    fail("train", "{} has room for {}, and a checkpoint takes {}{}: free some space or choose another --out",
         space.run, size_text(room), size_text(each),
         saved.empty() ? "" : " beside the newest one, which stays until the next is whole");
  const int64_t all = std::ssize(saved) + space.num_ahead;
  const int64_t most = space.keep > 0 ? std::min(all, num_left(space.keep) + 1) : all;  // at once
  const double needed = static_cast<double>(most) * each;
  if (needed <= free + held) return "";
  const auto fitting = static_cast<int64_t>((free + held) / each);  // at once
  const int64_t fewest = num_left(1) + 1;                           // at once, however few are kept
  const std::string advice =
      fitting >= fewest
          ? fmt::format("--keep-checkpoints {} keeps the newest only", fitting)
          : fmt::format(
                "the newest stays until the next is whole, so there must be room for two: free {} or "
                "choose another --out",
                size_text(static_cast<double>(fewest) * each - free - held));
  return fmt::format("{} has room for {}, and {} checkpoints of this run take {}: {}", space.run,
                     size_text(free + held), most, size_text(needed), advice);
}

void make_room(const CheckpointSpace& space) {
  if (space.keep > 0 && space.available < space.bytes) prune_checkpoints(space.run, num_left(space.keep));
}

}  // namespace kiln
