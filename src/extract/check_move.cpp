// Moves pictures that kiln check-data found out of a data set.
#include <algorithm>
#include <filesystem>
#include <set>
#include <sstream>

#include "core/error.h"
#include "core/files/atomic_file.h"
#include "core/files/input_file.h"
#include "core/text/json_text.h"
#include "extract/check_data.h"

namespace kiln {

namespace {

namespace fs = std::filesystem;

constexpr const char* kWho = "check-data";
constexpr const char* kList = "metadata.jsonl";

std::set<Finding> moved_findings(const CheckOptions& options) {
  std::set<Finding> findings;
  std::istringstream names(options.moved);
  for (std::string name; std::getline(names, name, ',');)
    findings.insert(parse_choice<Finding>(kWho, "--move", name));
  return findings;
}

// Both places are below the two folders under the same name.
void move_file(const fs::path& from, const fs::path& to) {
  std::error_code error;
  fs::create_directories(to.parent_path(), error);
  if (!error) fs::rename(from, to, error);
  if (error)
    fail(kWho, "cannot move {} to {}: {}; --move-to needs a folder on the same file system", from.string(),
         to.string(), error.message());
}

fs::path caption_of(const std::string& name) { return fs::path(name).replace_extension(".txt"); }

// Moves the lines of these pictures from one list to the end of the other.
void move_lines(const fs::path& from, const fs::path& to, const std::set<std::string>& names) {
  std::string kept, moved;
  if (fs::exists(to)) {
    const std::vector<std::byte> there = read_file(kWho, to.string());
    moved.assign(reinterpret_cast<const char*>(there.data()), there.size());
  }
  LineReader lines(kWho, from.string());
  for (std::string line; lines.next(line);) {
    const nlohmann::json fields = json_or_discarded(kWho, line, from.string());
    const bool is_moved = fields.is_object() && names.contains(fields.value("file_name", ""));
    (is_moved ? moved : kept) += line + "\n";
  }
  fs::create_directories(to.parent_path());
  write_file_atomically(kWho, to.string(), moved);
  write_file_atomically(kWho, from.string(), kept);
}

}  // namespace

void check_move(const CheckOptions& options, const ImageDataset& dataset) {
  moved_findings(options);
  const std::string layout = dataset.layout();
  if (layout == "webdataset" || layout == "data_info")
    fail(kWho, "--move-to cannot change {}: --json lists what to leave out of {} when you make it anew",
         layout == "webdataset" ? "a tar" : "data_info.json", options.extract.data);
  const fs::path data = fs::canonical(options.extract.data), to = fs::weakly_canonical(options.move_to);
  if (std::mismatch(data.begin(), data.end(), to.begin(), to.end()).first == data.end())
    fail(kWho, "--move-to {} lies in {}, whose pictures are read: give a folder outside", options.move_to,
         options.extract.data);
}

int64_t move_found(const CheckedData& data, const CheckOptions& options) {
  const fs::path from = options.extract.data, to = options.move_to;
  const std::set<Finding> findings = moved_findings(options);
  std::set<std::string> moved;
  for (const FoundPicture& of : data.found)
    if (findings.contains(of.finding))
      moved.insert(data.dataset->records()[static_cast<size_t>(of.picture)].name);
  std::set<fs::path> captions_of_others;
  for (const ImageRecord& record : data.dataset->records())
    if (!moved.contains(record.name)) captions_of_others.insert(caption_of(record.name));
  std::set<fs::path> files;
  for (const std::string& name : moved) {
    files.insert(name);
    if (!captions_of_others.contains(caption_of(name))) files.insert(caption_of(name));
  }
  std::erase_if(files, [&](const fs::path& file) { return !fs::exists(from / file); });
  // Before the first is moved: a list would name files that are no longer there.
  for (const fs::path& file : files)
    if (fs::exists(to / file))
      fail(kWho, "{} is there already: give another --move-to", (to / file).string());
  for (const fs::path& file : files) move_file(from / file, to / file);
  if (!moved.empty() && std::string_view(data.dataset->layout()) == "metadata_jsonl")
    move_lines(from / kList, to / kList, moved);
  return std::ssize(moved);
}

}  // namespace kiln
