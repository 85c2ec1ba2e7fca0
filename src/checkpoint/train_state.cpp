#include "checkpoint/train_state.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "core/error.h"
#include "core/files/atomic_file.h"
#include "core/files/entries.h"
#include "core/files/input_file.h"
#include "core/files/xxh3.h"
#include "core/json_fields.h"
#include "core/text/json_text.h"
#include "core/units.h"

namespace kiln {

namespace fs = std::filesystem;

namespace {

constexpr const char* kStateFile = "train_state.json";
constexpr const char* kPartialPrefix = ".partial-";
constexpr const char* kDamagedPrefix = "damaged-";
constexpr int kFormatVersion = 1;
// The XXH3 of all text before it. It comes last in the alphabet, so it is the last entry of train_state.json.
constexpr std::string_view kOwnChecksum = "\"xxh3\": \"";

fs::path checkpoints_folder(const std::string& run) { return fs::path(run) / "checkpoints"; }

void sync_folder(const fs::path& folder) {
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  ::fsync(fd);
  ::close(fd);
}

std::string checksum_of_text(std::string_view text) {
  return xxh3_hex(std::as_bytes(std::span(text.data(), text.size())));
}

// Reads train_state.json and checks its own checksum, which older files lack.
nlohmann::json read_state_json(const fs::path& folder) {
  const fs::path path = folder / kStateFile;
  constexpr JsonOptions kLimits;
  const std::string text = read_input("checkpoint", path.string(), kLimits.most_bytes);
  nlohmann::json state = json_or_discarded("checkpoint", text, path.string());
  if (!state.is_object()) fail("checkpoint", "{} is not a JSON object", path.string());
  const std::string_view before = std::string_view(text).substr(0, text.rfind(kOwnChecksum));
  if (state.contains("xxh3") && state["xxh3"] != checksum_of_text(before))
    fail("checkpoint", "{} has other bytes than were written", path.string());
  return state;
}

// Returns the text of train_state.json, with its own checksum.
std::string sealed(nlohmann::json state) {
  state["xxh3"] = std::string(16, '0');
  std::string text = state.dump(2) + "\n";
  const size_t end = text.rfind(kOwnChecksum);
  return text.replace(end + kOwnChecksum.size(), 16, checksum_of_text(std::string_view(text).substr(0, end)));
}

// Returns the size of a file, or nothing if there is no such file. Throws Error when the system cannot tell.
// That is no damage: a later start may see the file.
std::optional<uint64_t> size_of(const fs::path& path) {
  std::error_code error;
  const uint64_t bytes = fs::file_size(path, error);
  if (!error) return bytes;
  if (error == std::errc::no_such_file_or_directory || error == std::errc::not_a_directory ||
      error == std::errc::is_a_directory)
    return std::nullopt;
  fail("checkpoint", "cannot read {}: {}", path.string(), error.message());
}

using FileSizes = std::vector<std::pair<std::string, uint64_t>>;

// Reads the sizes that train_state.json lists. Throws an exception that says why it cannot.
FileSizes listed_sizes(const fs::path& folder) {
  const nlohmann::json state = read_state_json(folder);
  if (const nlohmann::json& version = state.at("format_version"); version != kFormatVersion)
    fail("checkpoint", "{} has format_version {}, expected {}: another version of Kiln wrote it",
         folder.string(), version.dump(), kFormatVersion);
  FileSizes sizes;
  for (const auto& [name, bytes] : state.at("files").items()) sizes.emplace_back(name, bytes.get<uint64_t>());
  return sizes;
}

// Returns what is wrong with a checkpoint; empty if it is complete. Throws Error if a file is there but
// cannot be read.
std::string defect_of(const fs::path& folder) {
  const fs::path state = folder / kStateFile;
  if (!std::ifstream(state) && size_of(state)) fail("checkpoint", "cannot read {}", state.string());
  FileSizes sizes;
  try {
    sizes = listed_sizes(folder);
  } catch (const Error& error) {
    return message_of(error);
  } catch (const std::exception& error) {
    return fmt::format("{} of {}: {}", kStateFile, folder.string(), message_of(error));
  }
  for (const auto& [name, expected] : sizes) {
    const std::optional<uint64_t> found = size_of(folder / name);
    if (!found) return fmt::format("{} lacks {}", folder.string(), name);
    if (*found != expected)
      return fmt::format("{} of {} has {} bytes, expected {}", name, folder.string(), *found, expected);
  }
  return "";
}

struct Found {
  std::vector<Checkpoint> complete;
  std::vector<std::string> defects;  // of the others, sorted
};

Found find_checkpoints(const std::string& run) {
  Found found;
  const fs::path folder = checkpoints_folder(run);
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const fs::path& path = entry->path();
    const auto step = step_of_checkpoint(path.filename().string());
    if (!step) continue;
    if (std::string defect = defect_of(path); !defect.empty())
      found.defects.push_back(std::move(defect));
    else
      found.complete.push_back({*step, path.string()});
  }
  std::error_code unreachable;  // then there is no run, and whoever begins one says what is wrong
  const bool is_absent = error == std::errc::no_such_file_or_directory ||
                         (error == std::errc::not_a_directory && !fs::is_directory(run, unreachable));
  if (error && !is_absent) fail("checkpoint", "cannot read {}: {}", folder.string(), error.message());
  std::ranges::sort(found.complete, {}, &Checkpoint::step);
  std::ranges::sort(found.defects);
  return found;
}

}  // namespace

std::string checkpoint_name(int64_t step) { return fmt::format("step-{:08}", step); }

std::optional<int64_t> step_of_checkpoint(const std::string& name) {
  constexpr std::string_view kPrefix = "step-";
  if (!name.starts_with(kPrefix)) return std::nullopt;
  const std::optional<int64_t> step = whole_number(std::string_view(name).substr(kPrefix.size()));
  return step && name == checkpoint_name(*step) ? step : std::nullopt;
}

std::string ema_file_name(const std::vector<double>& decays, size_t index) {
  return index == 0 ? "ema.safetensors" : fmt::format("ema-{}.safetensors", decays.at(index));
}

std::string checkpoint_folder(const std::string& run, int64_t step) {
  return (checkpoints_folder(run) / checkpoint_name(step)).string();
}

std::string partial_checkpoint_folder(const std::string& run, int64_t step) {
  return (checkpoints_folder(run) / (kPartialPrefix + checkpoint_name(step))).string();
}

std::vector<Checkpoint> list_checkpoints(const std::string& run) { return find_checkpoints(run).complete; }

std::vector<std::string> damaged_checkpoints(const std::string& run) { return find_checkpoints(run).defects; }

TrainStateInfo read_train_state(const std::string& checkpoint_folder) {
  const nlohmann::json state = read_state_json(checkpoint_folder);
  try {
    TrainStateInfo info;
    KILN_READ_FIELDS(state, info, seed, step, images_seen, updates, loss_scale, scaler_good_steps, bad_steps,
                     train_seconds, num_threads, machine, log_window, config);
    info.scaler_overflows = state.value("scaler_overflows", int64_t{0});
    info.world_size = state.value("world_size", int64_t{1});
    return info;
  } catch (const nlohmann::json::exception& error) {
    fail("checkpoint", "{}/{}: {}", checkpoint_folder, kStateFile, message_of(error));
  }
}

std::vector<CheckpointFile> read_file_list(const std::string& checkpoint_folder) {
  const nlohmann::json state = read_state_json(checkpoint_folder);
  try {
    const nlohmann::json checksums = state.value("checksums", nlohmann::json::object());
    std::vector<CheckpointFile> files;
    for (const auto& [name, bytes] : state.at("files").items())
      files.push_back({.name = name, .bytes = bytes, .checksum = checksums.value(name, "")});
    return files;
  } catch (const nlohmann::json::exception& error) {
    fail("checkpoint", "{}/{}: {}", checkpoint_folder, kStateFile, message_of(error));
  }
}

CheckpointWriter::CheckpointWriter(const std::string& run, int64_t step)
    : final_(checkpoint_folder(run, step)), partial_(partial_checkpoint_folder(run, step)) {
  std::error_code error;
  fs::remove_all(partial_, error);
  fs::create_directories(partial_, error);
  if (error) fail("checkpoint", "cannot create {}: {}", partial_, error.message());
}

CheckpointWriter::~CheckpointWriter() {
  if (committed_) return;
  std::error_code error;
  fs::remove_all(partial_, error);
}

std::string CheckpointWriter::commit(const TrainStateInfo& info,
                                     const std::map<std::string, FileChecksum>& checksums) {
  nlohmann::json files, checksums_of_files = nlohmann::json::object();
  for (const auto& entry : entries_of(partial_)) {
    const std::string name = entry.path().filename().string();
    files[name] = entry.file_size();
    const auto checksum = checksums.find(name);
    if (checksum == checksums.end()) continue;
    const std::optional<std::string> of_file = checksum->second.of_file(entry.file_size());
    if (!of_file) throw std::logic_error("not all bytes of " + name + " are in its checksum");
    checksums_of_files[name] = *of_file;
  }
  nlohmann::json state = {
      {"format_version", kFormatVersion}, {"files", files}, {"checksums", checksums_of_files}};
  KILN_WRITE_FIELDS(state, info, seed, step, images_seen, updates, loss_scale, scaler_good_steps,
                    scaler_overflows, bad_steps, train_seconds, num_threads, world_size, machine, log_window,
                    config);
  write_file_atomically("checkpoint", (fs::path(partial_) / kStateFile).string(), sealed(std::move(state)));
  sync_folder(partial_);
  std::error_code error, ignored;
  // The old checkpoint is renamed before it is removed, as in prune_checkpoints(): an interrupted removal
  // would leave a torn one.
  const std::string replaced = partial_ + "-replaced";
  fs::remove_all(replaced, ignored);  // left by a removal that failed
  fs::rename(final_, replaced, ignored);
  fs::rename(partial_, final_, error);
  if (error) fail("checkpoint", "cannot rename {} to {}: {}", partial_, final_, error.message());
  committed_ = true;
  fs::remove_all(replaced, ignored);
  sync_folder(fs::path(final_).parent_path());
  return final_;
}

std::string set_aside(const Checkpoint& checkpoint) {
  const fs::path folder = checkpoint.folder;
  const std::string name = kDamagedPrefix + folder.filename().string();
  std::error_code error;
  fs::path aside = folder.parent_path() / name;
  for (int number = 2; fs::exists(aside, error); ++number)
    aside = folder.parent_path() / fmt::format("{}-{}", name, number);
  fs::rename(folder, aside, error);
  if (error)
    fail("checkpoint", "cannot rename {} to {}: {}", folder.string(), aside.string(), error.message());
  return aside.string();
}

void prune_checkpoints(const std::string& run, int64_t keep) {
  std::error_code error;
  std::vector<fs::path> leftovers;
  for (const auto& entry : readable_entries_of(checkpoints_folder(run)))
    if (entry.path().filename().string().starts_with(kPartialPrefix)) leftovers.push_back(entry.path());
  for (const fs::path& path : leftovers) fs::remove_all(path, error);
  if (keep <= 0) return;
  std::vector<Checkpoint> checkpoints = list_checkpoints(run);
  for (int64_t i = 0; i + keep < static_cast<int64_t>(checkpoints.size()); ++i) {
    // Renamed first: a removal that is interrupted must not leave a folder that looks like a checkpoint.
    const fs::path doomed = partial_checkpoint_folder(run, checkpoints[i].step);
    fs::rename(checkpoints[i].folder, doomed, error);
    fs::remove_all(doomed, error);
  }
}

}  // namespace kiln
