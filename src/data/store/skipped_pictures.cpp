#include "data/store/skipped_pictures.h"

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "core/error.h"
#include "core/files/atomic_file.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;

std::string path_in(const std::string& folder) { return (fs::path(folder) / kLeftOutFile).string(); }

std::string line_of(const SkippedPicture& picture) {
  return left_out_line(picture.name, picture.why).dump() + "\n";
}

std::string text_of(const std::vector<SkippedPicture>& pictures) {
  std::string text;
  for (const SkippedPicture& picture : pictures) text += line_of(picture);
  return text;
}

}  // namespace

std::vector<SkippedPicture> read_skipped(const std::string& folder) {
  std::vector<SkippedPicture> pictures;
  for (const nlohmann::json& line : read_left_out(path_in(folder)))
    pictures.push_back({.name = left_out_name(line), .why = line.at("why")});
  return pictures;
}

SkippedPictures::SkippedPictures(const std::string& folder) : path_(path_in(folder)) {
  if (!fs::exists(path_)) return;
  const std::vector<SkippedPicture> found = read_skipped(folder);
  for (const SkippedPicture& picture : found) names_.insert(picture.name);
  if (const std::string whole = text_of(found); whole.size() != fs::file_size(path_))
    write_file_atomically("extract", path_, whole);
}

void SkippedPictures::add(const SkippedPicture& picture) {
  if (!names_.insert(picture.name).second) return;
  if (!file_) file_.reset(std::fopen(path_.c_str(), "ab"));
  const std::string line = line_of(picture);
  if (!file_ || std::fwrite(line.data(), 1, line.size(), file_.get()) != line.size() ||
      std::fflush(file_.get()) != 0)
    fail("extract", "cannot write {}: {}", path_, std::strerror(errno));
}

void join_skipped(const std::string& folder, const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += text_of(read_skipped(part));
  if (!text.empty()) write_file_atomically("extract", path_in(folder), text);
}

}  // namespace kiln
