#include "watch/run_log.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#include "core/error.h"
#include "core/files/atomic_file.h"

namespace kiln {

namespace {

std::string log_path(const std::string& run) { return run + "/log.jsonl"; }

}  // namespace

std::vector<nlohmann::json> read_run_log(const std::string& run) {
  std::ifstream file(log_path(run));
  std::vector<nlohmann::json> lines;
  for (std::string text; std::getline(file, text);) {
    nlohmann::json line = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (line.is_object()) lines.push_back(std::move(line));
  }
  return lines;
}

RunLog::RunLog(const std::string& run, int64_t from_step) : path_(log_path(run)) {
  std::ifstream file(path_);
  std::string kept;
  bool cut = false;
  for (std::string text; std::getline(file, text);) {
    const nlohmann::json line = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
    const bool whole = line.is_object() && !file.eof();  // a torn line has no newline
    if (whole && line.value("step", int64_t{0}) <= from_step)
      kept += text + "\n";
    else
      cut = true;
  }
  file.close();
  if (cut) write_file_atomically("log", path_, kept);
  fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (fd_ < 0) fail("log", "cannot open {}: {}", path_, std::strerror(errno));
}

RunLog::~RunLog() { ::close(fd_); }

void RunLog::append(const nlohmann::json& line) {
  const std::string text = line.dump() + "\n";
  const off_t end = ::lseek(fd_, 0, SEEK_END);
  for (std::string_view rest = text; !rest.empty();) {
    const ssize_t written = ::write(fd_, rest.data(), rest.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      const int error = errno;
      if (end >= 0 && ::ftruncate(fd_, end) != 0) fail_with_errno("log", "cut a torn line of", path_, errno);
      fail_with_errno("log", "write", path_, error);
    }
    rest.remove_prefix(static_cast<size_t>(written));
  }
}

}  // namespace kiln
