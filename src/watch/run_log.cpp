#include "watch/run_log.h"

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
  file_.reset(std::fopen(path_.c_str(), "ab"));
  if (!file_) fail("log", "cannot open {}: {}", path_, std::strerror(errno));
}

void RunLog::append(const nlohmann::json& line) {
  const std::string text = line.dump() + "\n";
  if (std::fwrite(text.data(), 1, text.size(), file_.get()) != text.size() || std::fflush(file_.get()) != 0)
    fail("log", "cannot write {}: {}", path_, std::strerror(errno));
}

}  // namespace kiln
