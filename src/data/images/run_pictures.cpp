#include "data/images/run_pictures.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <span>
#include <unordered_set>
#include <utility>

#include "core/error.h"
#include "core/files/file_system.h"
#include "core/files/input_file.h"
#include "core/files/xxh3.h"
#include "core/text/utf8.h"
#include "data/images/ordered_workers.h"

namespace kiln {
namespace {

using Json = nlohmann::json;

// What the header of a file says, or why there is none.
struct HeaderRead {
  ImageHeader header{};
  int64_t num_bytes = 0;
  std::string why{};
};

}  // namespace

RunPictures::RunPictures(std::unique_ptr<ImageDataset> all, const Options& options)
    : all_(std::move(all)), of_(options.of) {
  class_names_ = all_->class_names();
  Known known;
  std::map<int64_t, Json> removed;
  for (const Json& line : options.left_out) {
    if (line.value("of", "") != of_) continue;
    const std::string name = left_out_name(line);
    known.emplace(name, -1);
    if (line.contains("place"))
      removed.emplace(line.at("place"), line);
    else
      by_header_.push_back({.name = name, .why = line.at("why")});
  }
  had_left_out_ = !known.empty();
  for (size_t i = 0; !known.empty() && i < all_->records().size(); ++i)
    if (const auto found = known.find(all_->records()[i].name); found != known.end())
      found->second = static_cast<int64_t>(i);
  read_headers(options, known, std::move(removed));
  contents_ = std::vector<std::atomic<uint64_t>>(files_.size());
  for (const auto& [place, broken] : broken_) contents_[static_cast<size_t>(place)] = kLeftOut;
  num_broken_ = broken_.size();
}

RunPictures::~RunPictures() {
  if (record_ >= 0) ::close(record_);
}

// Fills the list with the pictures that can be used and were not left out. Those that decoding showed to be
// broken stand where they were, whatever is now in their files.
void RunPictures::read_headers(const Options& options, const Known& known, std::map<int64_t, Json> removed) {
  const auto num_pictures = static_cast<int64_t>(all_->records().size());
  const auto read_one = [&](int64_t index) -> HeaderRead {
    const std::string& name = all_->records()[static_cast<size_t>(index)].name;
    if (!known.empty() && known.contains(name)) return {};
    try {
      const PictureBytes file = all_->bytes(index);
      const ImageHeader header = read_image_header(file, name);
      if (std::min(header.height, header.width) < options.least_side)
        return {.why = too_small_text(name, header.height, header.width, options.least_side)};
      return {.header = header, .num_bytes = file.size};
    } catch (const BrokenPicture& error) {
      return {.why = message_of(error)};
    } catch (const NoSuchFile& error) {
      return {.why = message_of(error)};
    }
  };
  // Other places are of other data: pictures are missing.
  const auto insert_removed = [&] {
    for (auto next = removed.begin(); next != removed.end() && next->first == std::ssize(records_);
         next = removed.erase(next))
      insert(next->first, next->second, known.at(left_out_name(next->second)));
  };
  constexpr int64_t kAhead = 4096;
  OrderedWorkers<HeaderRead> workers(0, num_pictures, options.num_threads, kAhead, read_one);
  for (int64_t index = 0; index < num_pictures; ++index) {
    insert_removed();
    const HeaderRead read = *workers.next();
    const ImageRecord& record = all_->records()[static_cast<size_t>(index)];
    if (!read.why.empty()) {
      by_header_.push_back({.name = record.name, .why = read.why});
    } else if (read.num_bytes > 0) {
      records_.push_back(record);
      files_.push_back({.index = index, .num_bytes = read.num_bytes, .header = read.header});
    }
  }
  insert_removed();
}

// Appends a picture of which a line was made.
void RunPictures::insert(int64_t place, const Json& line, int64_t index_in_all) {
  ImageRecord record{.name = left_out_name(line), .label = line.at("label"), .captions = {}};
  for (const Json& caption : line.at("captions"))
    record.captions.push_back(
        {.text = caption.at("text"), .kind = caption.at("kind"), .weight = caption.at("weight")});
  records_.push_back(std::move(record));
  files_.push_back(
      {.index = index_in_all,
       .num_bytes = line.at("bytes"),
       .header = {
           .height = line.at("height"), .width = line.at("width"), .orientation = line.at("orientation")}});
  broken_.emplace(place, Broken{.why = line.at("why"), .texts = line.at("png_texts").get<PngTexts>()});
}

nlohmann::ordered_json RunPictures::line_of(int64_t index, const Broken& broken) const {
  const ImageRecord& record = records_[static_cast<size_t>(index)];
  const File& file = files_[static_cast<size_t>(index)];
  nlohmann::ordered_json line = left_out_line(record.name, broken.why);
  Json captions = Json::array();
  for (const Caption& caption : record.captions)
    captions.push_back(
        {{"text", in_utf8(caption.text)}, {"kind", in_utf8(caption.kind)}, {"weight", caption.weight}});
  line.update({{"place", index},
               {"label", record.label},
               {"captions", std::move(captions)},
               {"png_texts", broken.texts},
               {"bytes", file.num_bytes},
               {"height", file.header.height},
               {"width", file.header.width},
               {"orientation", file.header.orientation}});
  return line;
}

PictureBytes RunPictures::bytes(int64_t index) const {
  const int64_t in_all = index_in_all(index);
  if (in_all < 0) throw BrokenPicture(find_broken(index)->why);
  return all_->bytes(in_all);
}

PngTexts RunPictures::png_texts(int64_t index) const {
  const Broken* broken = find_broken(index);
  return broken ? broken->texts : ImageDataset::png_texts(index);
}

std::vector<std::byte> RunPictures::read(int64_t index) const {
  if (const Broken* broken = find_broken(index)) throw BrokenPicture(broken->why);
  if (content_of(index) == kLeftOut)
    throw BrokenPicture(fmt::format("the picture {} was found broken before and stays left out",
                                    records_[static_cast<size_t>(index)].name));
  std::vector<std::byte> content = ImageDataset::read(index);
  check_content(index, content);
  return content;
}

const RunPictures::Broken* RunPictures::find_broken(int64_t index) const {
  if (num_broken_ == 0) return nullptr;
  const std::lock_guard lock(mutex_);
  const auto found = broken_.find(index);
  return found == broken_.end() ? nullptr : &found->second;
}

void RunPictures::check_content(int64_t index, std::span<const std::byte> content) const {
  const uint64_t hash = std::clamp<uint64_t>(xxh3(content), 1, kLeftOut - 1);
  uint64_t before = content_of(index);
  if (before == 0 && contents_[static_cast<size_t>(index)].compare_exchange_strong(before, hash))
    return remember(index, hash);
  if (before != hash)
    fail("loader",
         "the content of {} has changed since this run read it first: put the old file back, or go on with "
         "--continue-with FILE, which takes the pictures as they are",
         records_[static_cast<size_t>(index)].name);
  contents_[static_cast<size_t>(index)] = hash;
}

// Returns what this rank knows of the content, or else what another one has written; 0: none has read it.
uint64_t RunPictures::content_of(int64_t index) const {
  uint64_t content = contents_[static_cast<size_t>(index)];
  const int64_t offset =
      index * static_cast<int64_t>(sizeof(Recorded)) + static_cast<int64_t>(offsetof(Recorded, content));
  if (content == 0 && record_ >= 0 &&
      read_at(record_, std::as_writable_bytes(std::span(&content, 1)), offset) != sizeof content)
    return 0;
  return content;
}

// A hash that cannot be written, as on a full disk, is missing when the run resumes: that picture is compared
// from then on.
void RunPictures::remember(int64_t index, uint64_t hash) const {
  if (record_ < 0) return;
  const int64_t offset =
      index * static_cast<int64_t>(sizeof(Recorded)) + static_cast<int64_t>(offsetof(Recorded, content));
  static_cast<void>(write_at(record_, std::as_bytes(std::span(&hash, 1)), offset));
}

std::vector<RunPictures::Recorded> RunPictures::recorded() const {
  std::vector<Recorded> entries(files_.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    const std::string file =
        fmt::format("{}\t{}\t{}", in_utf8(records_[i].name), records_[i].label, files_[i].num_bytes);
    entries[i] = {.file = xxh3(std::as_bytes(std::span(file))), .content = contents_[i]};
  }
  return entries;
}

std::string RunPictures::record_path(const std::string& run, int64_t stage) const {
  return fmt::format("{}/{}-{:08}.xxh3", run, of_ == "--data" ? "pictures" : "validation-pictures", stage);
}

void RunPictures::record_in(const std::string& run, int64_t stage, bool is_new) const {
  list_ = std::make_unique<LeftOutList>(run + "/" + kLeftOutFile, stage, of_);
  std::vector<nlohmann::ordered_json> lines;
  for (const SkippedPicture& picture : by_header_) lines.push_back(left_out_line(picture.name, picture.why));
  list_->add(std::move(lines));
  const std::string path = record_path(run, stage);
  record_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | (is_new ? O_TRUNC : 0), 0666);
  if (record_ < 0) fail("train", "cannot write {}: {}", path, std::strerror(errno));
  const std::vector<Recorded> own = recorded();
  std::vector<Recorded> found(own.size());
  const auto bytes = std::as_writable_bytes(std::span(found));
  const int64_t num_read = read_at(record_, bytes, 0);
  if (num_read < 0) fail("train", "cannot read {}: {}", path, std::strerror(errno));
  if (num_read == std::ssize(bytes) && std::ranges::equal(own, found, {}, &Recorded::file, &Recorded::file)) {
    for (size_t i = 0; i < found.size(); ++i)
      if (own[i].content != kLeftOut) contents_[i] = found[i].content;
  } else if (!write_at(record_, std::as_bytes(std::span(own)), 0) ||
             ::ftruncate(record_, std::ssize(bytes)) != 0) {
    fail("train", "cannot write {}: {}", path, std::strerror(errno));
  }
}

std::string RunPictures::first_unrecorded(const std::string& run, int64_t stage) const {
  const std::string path = record_path(run, stage);
  if (!std::filesystem::exists(path)) return "";
  const std::vector<std::byte> bytes = read_file("train", path);
  std::unordered_set<uint64_t> found;
  for (size_t begin = 0; begin + sizeof(Recorded) <= bytes.size(); begin += sizeof(Recorded)) {
    Recorded entry;
    std::memcpy(&entry, bytes.data() + begin, sizeof entry);
    found.insert(entry.file);
  }
  if (found.empty()) return "";
  const std::vector<Recorded> own = recorded();
  const auto other =
      std::ranges::find_if(own, [&](const Recorded& entry) { return !found.contains(entry.file); });
  return other == own.end() ? "" : records_[static_cast<size_t>(other - own.begin())].name;
}

std::string RunPictures::identity() const {
  std::vector<int64_t> sizes;
  for (const File& file : files_) sizes.push_back(file.num_bytes);
  return fmt::format("{} images {} of sizes {}", records_.size(), dataset_fingerprint(*this),
                     xxh3_hex(std::as_bytes(std::span(sizes))));
}

std::vector<SkippedPicture> RunPictures::all_left_out() const {
  std::vector<SkippedPicture> all = by_header_;
  const std::lock_guard lock(mutex_);
  for (const auto& [index, broken] : broken_)
    all.push_back({.name = records_[static_cast<size_t>(index)].name, .why = broken.why});
  return all;
}

std::vector<SkippedPicture> RunPictures::take_new_left_out() const {
  if (num_broken_ == 0) return {};
  const std::lock_guard lock(mutex_);
  return std::exchange(new_, {});
}

// A line that cannot be written, as on a full disk, is missing when the run resumes: until then the picture
// may not be repaired.
void RunPictures::leave_out(int64_t index, const std::string& why) const {
  if (find_broken(index)) return;  // it is met again in each epoch
  Broken broken{.why = in_utf8(why), .texts = {}};
  try {
    for (const auto& [keyword, text] : ImageDataset::png_texts(index))
      broken.texts.emplace_back(in_utf8(keyword), in_utf8(text));
  } catch (const Error&) {  // it cannot even be read any more
  }
  const std::lock_guard lock(mutex_);
  const auto [entry, is_new] = broken_.emplace(index, std::move(broken));
  if (!is_new) return;
  num_broken_ = broken_.size();
  contents_[static_cast<size_t>(index)] = kLeftOut;
  remember(index, kLeftOut);
  try {
    const bool is_known = list_ && list_->add({line_of(index, entry->second)}) == 0;
    if (is_known) return;
  } catch (const Error&) {
  }
  new_.push_back({.name = records_[static_cast<size_t>(index)].name, .why = entry->second.why});
}

}  // namespace kiln
