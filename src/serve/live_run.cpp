#include "serve/live_run.h"

#include <fmt/chrono.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "checkpoint/train_state.h"
#include "core/error.h"
#include "core/files/input_file.h"
#include "core/text/json_text.h"
#include "watch/run_requests.h"

namespace kiln {

namespace {

namespace fs = std::filesystem;

constexpr size_t kMostLines = 600;         // a plot is about as many pixels wide
constexpr int64_t kBytesAtOnce = 1 << 20;  // of a log; a longer line is passed over

// Changes whenever a file beside the log is written, or a folder gets another entry.
std::string state_beside_log(const std::string& folder) {
  std::string state;
  for (const char* name :
       {"evaluations.jsonl", "plan.json", "precision.json", "samples", "checkpoints", "requests"}) {
    struct stat info {};  // stays so without such a file
    ::stat((folder + "/" + name).c_str(), &info);
    state += fmt::format("{}.{}.{} ", info.st_mtim.tv_sec, info.st_mtim.tv_nsec, info.st_size);
  }
  return state;
}

}  // namespace

LiveRun::LiveRun(std::string folder) : run_(unread_run(folder)), steps_(kMostLines) {}

bool LiveRun::update() try {
  const bool could_not_be_read = !std::exchange(problem_, "").empty();
  const bool has_new_lines = read_log();
  return read_beside() || has_new_lines || could_not_be_read;
} catch (const std::exception& error) {
  problem_ = message_of(error);
  return true;
}

bool LiveRun::read_log() {
  unread_ = 0;
  const std::string path = run_.folder + "/log.jsonl";
  if (!fs::is_regular_file(path)) return false;
  const RandomAccessFile file("serve", path);
  struct stat info {};
  if (::fstat(file.fd(), &info) != 0) return false;
  if (info.st_ino != log_file_ || file.size() < offset_) {  // another log: all lines are read again
    run_ = {.folder = run_.folder, .name = run_.name};
    steps_ = ThinnedLines(kMostLines);
    state_beside_.clear();
    log_file_ = info.st_ino;
    offset_ = 0;
  }
  written_at_ = info.st_mtim.tv_sec;
  std::string text(static_cast<size_t>(std::min(kBytesAtOnce, file.size() - offset_)), '\0');
  file.read(offset_, std::as_writable_bytes(std::span(text)));
  const size_t end = text.rfind('\n') + 1;
  const bool is_too_long = end == 0 && std::ssize(text) == kBytesAtOnce;
  const int64_t taken = is_too_long ? kBytesAtOnce : static_cast<int64_t>(end);
  offset_ += taken;  // whatever the lines are, they are taken once
  for (size_t begin = 0; begin < end; begin = text.find('\n', begin) + 1)
    take_line(text.substr(begin, text.find('\n', begin) - begin));
  // A line whose end is not written yet is left for the next time.
  unread_ = taken > 0 ? file.size() - offset_ : 0;
  if (taken > 0) run_.steps = steps_.lines();
  return taken > 0;
}

void LiveRun::take_line(const std::string& text) try {
  nlohmann::json line = json_or_discarded("serve", text, "log.jsonl");
  if (!line.is_object()) return;
  count_line(line, run_);
  if (line.contains("event")) run_.log.push_back(line);
  if (line.contains("loss")) steps_.add(std::move(line));
} catch (const std::exception&) {  // beyond the limits of JSON, or its values: passed over as what is none
}

bool LiveRun::read_beside() {
  const std::string state = state_beside_log(run_.folder);
  if (state == state_beside_) return false;
  read_beside_log(run_);
  run_.grids.clear();
  pictures_.clear();
  for (const fs::path& path : spread(grid_paths(run_.folder), kMostGrids)) {
    const std::string name = path.filename().string();
    run_.grids.push_back(read_grid(path, "samples/" + name));
    pictures_[name] = path.string();
  }
  state_beside_ = state;
  return true;
}

std::string LiveRun::status() const {
  if (!problem_.empty()) return "It cannot be read: " + problem_;
  std::string text = "The log has no line yet.";
  std::tm local{};
  if (written_at_ > 0 && ::localtime_r(&written_at_, &local))
    text = fmt::format("Last line at {:%F %T}.", local);
  if (has_more())
    text += fmt::format(" {:.0f} % of the log is read.",
                        100.0 * static_cast<double>(offset_) / static_cast<double>(offset_ + unread_));
  for (const std::string& request : waiting_requests(run_.folder))
    text += fmt::format(" Asked for, not served yet: {}.", request);
  return text;
}

}  // namespace kiln
