#include "data/store/store_parts.h"

#include <algorithm>
#include <filesystem>

#include "core/error.h"
#include "core/files/atomic_file.h"
#include "core/files/entries.h"
#include "core/files/mapped_file.h"
#include "data/images/left_out_list.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;

constexpr const char* kWho = "feature store";

bool is_part(const fs::path& path) { return path.filename().string().starts_with("part-"); }

void remove_parts(const std::string& out) {
  for (const auto& entry : entries_of(out))
    if (is_part(entry.path())) fs::remove_all(entry.path());
}

// Gives the file a second name where the disk allows it, else copies it: whole and synced, since its part is
// removed afterwards.
void place(const fs::path& from, const fs::path& to) {
  std::error_code error;
  fs::remove(to, error);
  fs::create_hard_link(from, to, error);
  if (!error) return;
  const MappedFile file(kWho, from.string());
  AtomicFile copy(kWho, to.string());
  copy.write(file.bytes());
  copy.commit();
}

// Returns the index of `lane` in the store, which has more lanes than a part: a finished part keeps only
// lanes with samples.
int64_t lane_in(const StoreInfo& info, const Lane& lane) {
  const auto found = std::find(info.lanes.begin(), info.lanes.end(), lane);
  if (found == info.lanes.end())
    throw std::logic_error("store parts: a part has a lane that the store has not");
  return found - info.lanes.begin();
}

}  // namespace

std::string store_part_folder(const std::string& out, int64_t rank, int64_t num_ranks) {
  return (fs::path(out) / fmt::format("part-{:05}-of-{:05}", rank, num_ranks)).string();
}

bool prepare_store_parts(const std::string& out, int64_t num_ranks) {
  std::error_code error;
  fs::create_directories(out, error);
  if (error) fail(kWho, "cannot create {}: {}", out, error.message());
  if (is_store(out)) {
    if (!read_store_info(out).complete)
      fail(kWho, "{} was begun by one process: go on with one, or choose another folder", out);
    remove_parts(out);
    return true;
  }
  const std::string of_ranks = fmt::format("-of-{:05}", num_ranks);
  for (const auto& entry : entries_of(out)) {
    const std::string name = entry.path().filename().string();
    if (is_part(entry.path()) && !name.ends_with(of_ranks))
      fail(kWho, "{} was begun by another number of ranks ({}): go on with as many, or choose another folder",
           out, name);
    // If joining was interrupted, shards have their second names here already.
    if (!is_part(entry.path()) && !name.starts_with("shard-") && !name.starts_with("store.json.") &&
        !name.starts_with(kLeftOutFile))
      fail(kWho, "expected an empty folder or a store, got a folder with {:?} ({}): choose another", name,
           out);
  }
  return false;
}

void remove_empty_store(const std::string& out) {
  const fs::path folder = out;
  if (is_store(out)) {
    if (read_store_info(out).num_samples > 0) fail(kWho, "expected a store without samples, got {}", out);
    for (const char* name : {"store.json", "unfinished-shard.log", kLeftOutFile}) fs::remove(folder / name);
  }
  remove_parts(out);
  std::error_code has_other_things;
  fs::remove(folder, has_other_things);
}

int64_t join_store_parts(const std::string& out, int64_t num_ranks, StoreInfo info) {
  info.shards.clear();
  info.num_samples = 0;
  std::vector<std::string> parts;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    const fs::path part = parts.emplace_back(store_part_folder(out, rank, num_ranks));
    if (!is_store(part.string())) continue;
    const StoreInfo of_part = read_store_info(part.string());
    for (StoreInfo::Shard shard : of_part.shards) {
      const std::string name = fmt::format("shard-{:05d}.safetensors", info.shards.size());
      place(part / shard.file, fs::path(out) / name);
      shard.file = name;
      shard.lane = lane_in(info, of_part.lanes[static_cast<size_t>(shard.lane)]);
      info.num_samples += shard.num_samples;
      info.shards.push_back(std::move(shard));
    }
  }
  if (info.num_samples == 0) fail(kWho, "expected at least one sample, got none ({})", out);
  info.drop_empty_lanes();
  info.complete = true;
  join_skipped(out, parts);
  write_file_atomically(kWho, (fs::path(out) / "store.json").string(), store_info_text(info));
  remove_parts(out);
  return info.num_samples;
}

}  // namespace kiln
