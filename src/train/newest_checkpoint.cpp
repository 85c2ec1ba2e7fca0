#include "train/newest_checkpoint.h"

#include <ATen/Parallel.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "checkpoint/checked_files.h"
#include "core/error.h"
#include "core/error_message.h"
#include "parallel/agreement.h"

namespace kiln {

namespace {

// Of this rank's part of a file's bytes, by all its threads.
FileChecksum checksum_of_share(const std::string& path, uint64_t bytes, const ProcessGroup& group) {
  const int64_t threads = at::get_num_threads(), num_parts = group.world_size() * threads;
  const auto begin_of = [bytes, count = static_cast<uint64_t>(num_parts)](int64_t index) {
    const auto part = static_cast<uint64_t>(index);
    return bytes / count * part + std::min(part, bytes % count);
  };
  std::vector<FileChecksum> parts(static_cast<size_t>(threads));
  at::parallel_for(0, threads, 1, [&](int64_t first, int64_t end) {
    for (int64_t thread = first; thread < end; ++thread) {
      const int64_t part = group.rank() * threads + thread;
      parts[static_cast<size_t>(thread)] = checksum_of_bytes(path, begin_of(part), begin_of(part + 1));
    }
  });
  FileChecksum share;
  for (const FileChecksum& part : parts) share.merge(part);
  return share;
}

// What is wrong with the bytes of a complete checkpoint; empty: nothing. The same on every rank, each of
// which reads a part. A collective.
std::string damage_of_bytes(const std::string& folder, ProcessGroup& group) {
  std::vector<CheckpointFile> files;
  agree(group, "the newest checkpoint", [&] { files = read_file_list(folder); });
  std::erase_if(files, [](const CheckpointFile& file) { return file.checksum.empty(); });
  if (files.empty()) return "";
  nlohmann::json mine = nlohmann::json::array();
  try {
    for (const CheckpointFile& file : files)
      mine.push_back(checksum_of_share(folder + "/" + file.name, file.bytes, group));
  } catch (const Error& error) {
    mine = bare_message_of(error);
  }
  std::vector<FileChecksum> found(files.size());
  for (const std::string& text : group.gather(mine.dump(), "the bytes of a checkpoint")) {
    const auto of_rank = nlohmann::json::parse(text);
    if (of_rank.is_string()) return of_rank.get<std::string>();
    for (size_t file = 0; file < files.size(); ++file)
      found[file].merge(of_rank.at(file).get<FileChecksum>());
  }
  for (size_t file = 0; file < files.size(); ++file)
    if (std::string damage = damage_of(folder, files[file], found[file]); !damage.empty()) return damage;
  return "";
}

// Complete ones, newest first, as rank 0 sees them. A collective.
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
  std::vector<std::string> damages;  // of those
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
    // Only where training goes on: it would count one that is newer as the one to keep.
    for (size_t i = 0; i < damaged.size(); ++i)
      newest.damaged.push_back(newest.checkpoint
                                   ? fmt::format("{}: it is {} now", damages[i], set_aside(damaged[i]))
                                   : damages[i]);
    if (newest.checkpoint || newest.damaged.empty()) return;
    fail("resume",
         "none of the {} checkpoints of {} is whole: {}: restore one, or remove {}/checkpoints to "
         "start again from step 0",
         newest.damaged.size(), run, fmt::join(newest.damaged, "; "), run);
  });
  return newest;
}

}  // namespace kiln
