#include "watch/run_log.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "core/error.h"
#include "core/files/atomic_file.h"
#include "core/files/input_file.h"
#include "core/text/json_text.h"
#include "core/text/printable.h"
#include "core/text/utf8.h"

namespace kiln {

namespace {

std::string log_path(const std::string& run) { return run + "/log.jsonl"; }

// Whether a line of a log was written up to `step`. A line that tells of no step counts as such.
bool is_up_to(const nlohmann::json& line, int64_t step) {
  if (!line.is_object()) return false;
  const auto found = line.find("step");
  return found == line.end() || (found->is_number() && found->get<double>() <= static_cast<double>(step));
}

}  // namespace

void read_run_log(const std::string& run, const std::function<void(nlohmann::json line)>& take) {
  if (!std::filesystem::is_regular_file(log_path(run))) return;
  LineReader file("log", log_path(run));
  for (std::string text; file.next(text);) {
    nlohmann::json line = json_or_discarded("log", text, log_path(run));
    if (line.is_object()) take(std::move(line));
  }
}

RunLog::RunLog(const std::string& run, int64_t from_step) : path_(log_path(run)) {
  if (std::filesystem::exists(path_)) cut_beyond(from_step);
  fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (fd_ < 0) fail("log", "cannot open {}: {}", path_, std::strerror(errno));
}

void RunLog::cut_beyond(int64_t step) {
  LineReader file("log", path_);
  std::string kept;
  bool cut = false;
  for (std::string text; file.next(text);) {
    if (file.is_whole() && is_up_to(json_or_discarded("log", text, path_), step))
      kept += text + "\n";
    else
      cut = true;
  }
  if (cut) write_file_atomically("log", path_, kept);
}

RunLog::~RunLog() { ::close(fd_); }

void RunLog::append(const nlohmann::json& line) { append_whole(fd_, "log", path_, dump_utf8(line) + "\n"); }

bool ByProducts::try_to_write(const std::string& name, const std::function<void()>& write) try {
  write();
  return true;
} catch (const std::exception& error) {
  if (missed_.insert(name).second)
    fmt::print(stderr, "warning: training goes on without {}: {}\n", name,
               printable(message_of(error), "\n"));
  return false;
}

}  // namespace kiln
