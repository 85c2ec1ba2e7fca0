#include "data/images/left_out_list.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "core/error.h"
#include "core/files/atomic_file.h"
#include "core/files/file_system.h"
#include "core/files/input_file.h"
#include "core/text/json_text.h"
#include "core/text/utf8.h"

namespace kiln {

namespace {

using Json = nlohmann::json;

// Returns null for a line that is torn or none of ours.
Json parse_line(std::string_view text) {
  Json line = json_or_discarded("train", text, "a list of pictures left out");
  const auto has = [&](const char* key, bool (Json::*is)() const noexcept) {
    return line.contains(key) && (line[key].*is)();
  };
  const bool is_whole = line.is_object() && has("picture", &Json::is_string) &&
                        has("why", &Json::is_string) && is_integer(line.value("stage", Json(-1)));
  if (!is_whole || !line.contains("name_hex")) return is_whole ? line : Json();
  const bool is_hex = has("name_hex", &Json::is_string) &&
                      std::ranges::all_of(line["name_hex"].get_ref<const std::string&>(),
                                          [](unsigned char c) { return std::isxdigit(c) != 0; });
  return is_hex ? line : Json();
}

bool is_of(const Json& line, int64_t stage, const std::string& of) {
  return line.value("stage", int64_t{-1}) == stage && line.value("of", "") == of;
}

// Holds the lock of an open file. Appending under it is safe on network file systems too; where one cannot
// lock, nobody waits.
class Locked {
 public:
  explicit Locked(int file) : file_(file) {
    while (::flock(file_, LOCK_EX) != 0 && errno == EINTR) {
    }
  }
  ~Locked() { ::flock(file_, LOCK_UN); }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  const int file_;
};

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

nlohmann::ordered_json left_out_line(const std::string& name, const std::string& why) {
  nlohmann::ordered_json line = {{"picture", in_utf8(name)}, {"why", in_utf8(why)}};
  if (line["picture"] == name) return line;
  std::string hex;
  for (const char c : name) hex += fmt::format("{:02x}", static_cast<unsigned char>(c));
  line["name_hex"] = hex;
  return line;
}

std::string left_out_name(const Json& line) {
  if (!line.contains("name_hex")) return line.at("picture");
  const auto hex = line.at("name_hex").get<std::string>();
  std::string name;
  for (size_t i = 0; i + 1 < hex.size(); i += 2)
    name += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  return name;
}

Json read_left_out(const std::string& path) {
  Json lines = Json::array();
  if (!std::filesystem::exists(path)) return lines;
  LineReader file("train", path);
  for (std::string text; file.next(text) && file.is_whole();)
    if (Json line = parse_line(text); !line.is_null()) lines.push_back(std::move(line));
  return lines;
}

void prepare_left_out(const std::string& path, int64_t stage, bool begins) {
  if (!std::filesystem::exists(path)) return;
  std::string text;
  LineReader file("train", path);
  for (std::string own; file.next(own) && file.is_whole();) {
    const Json line = parse_line(own);
    if (line.is_null() || line.value("stage", int64_t{-1}) > stage - (begins ? 1 : 0)) continue;
    text += own + '\n';
  }
  if (text.size() != std::filesystem::file_size(path)) write_file_atomically("train", path, text);
}

LeftOutList::LeftOutList(const std::string& path, int64_t stage, std::string of)
    : path_(path),
      stage_(stage),
      of_(std::move(of)),
      file_(::open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666)) {
  if (file_ < 0) fail("train", "cannot write {}: {}", path, std::strerror(errno));
}

LeftOutList::~LeftOutList() { ::close(file_); }

// Reads what this object or others have added. Returns true if a torn line ends it.
bool LeftOutList::read_on() {
  const off_t end_of_file = ::lseek(file_, 0, SEEK_END);
  std::string text(static_cast<size_t>(std::max<int64_t>(end_of_file - num_read_, 0)), '\0');
  if (read_at(file_, std::as_writable_bytes(std::span(text)), num_read_) != std::ssize(text))
    fail("train", "cannot read {}: {}", path_, std::strerror(errno));
  size_t begin = 0;
  for (size_t end = 0; (end = text.find('\n', begin)) != text.npos; begin = end + 1) {
    const Json line = parse_line(std::string_view(text).substr(begin, end - begin));
    if (!line.is_null() && is_of(line, stage_, of_)) listed_.insert(left_out_name(line));
  }
  num_read_ += static_cast<int64_t>(begin);
  return begin < text.size();
}

int64_t LeftOutList::add(std::vector<nlohmann::ordered_json> lines) {
  const Locked lock(file_);
  std::string text = read_on() ? "\n" : "";
  int64_t num_added = 0;
  for (nlohmann::ordered_json& line : lines) {
    if (!listed_.insert(left_out_name(line)).second) continue;
    line["stage"] = stage_;
    line["of"] = of_;
    text += line.dump() + '\n';
    ++num_added;
  }
  append_whole(file_, "train", path_, text);
  if (::fdatasync(file_) != 0) fail("train", "cannot write {}: {}", path_, std::strerror(errno));
  return num_added;
}

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
