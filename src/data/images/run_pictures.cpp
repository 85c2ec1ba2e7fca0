#include "data/images/run_pictures.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <unordered_set>

#include "core/error.h"
#include "core/files/xxh3.h"
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

RunPictures::RunPictures(std::unique_ptr<ImageDataset> all, const Options& options) : all_(std::move(all)) {
  class_names_ = all_->class_names();
  notes_ = all_->notes();
  std::map<std::string, bool> known;  // pictures that were left out: true if they have a place
  for (const Json& picture : options.left_out) {
    const bool has_place = picture.contains("place");
    known.emplace(picture.at("picture"), has_place);
    if (!has_place) by_header_.push_back({.name = picture.at("picture"), .why = picture.at("why")});
  }
  read_headers(options, known);
  if (!options.left_out.is_null()) insert_removed(options.left_out);
  contents_ = std::vector<std::atomic<uint64_t>>(files_.size());
}

RunPictures::~RunPictures() {
  if (record_ >= 0) ::close(record_);
}

// Fills the list with the pictures that can be used and were not left out.
void RunPictures::read_headers(const Options& options, const std::map<std::string, bool>& known) {
  const auto num_pictures = static_cast<int64_t>(all_->records().size());
  const auto read_one = [&](int64_t index) -> HeaderRead {
    const std::string& name = all_->records()[static_cast<size_t>(index)].name;
    if (!known.empty() && known.contains(in_utf8(name))) return {};
    try {
      const PictureBytes file = all_->bytes(index);
      const ImageHeader header = read_image_header(file, name);
      if (std::min(header.height, header.width) < options.least_side)
        return {.why = too_small_text(name, header.height, header.width, options.least_side)};
      return {.header = header, .num_bytes = file.size};
    } catch (const Error& error) {
      return {.why = error.what()};
    }
  };
  constexpr int64_t kAhead = 4096;
  OrderedWorkers<HeaderRead> workers(0, num_pictures, options.num_threads, kAhead, read_one);
  for (int64_t index = 0; index < num_pictures; ++index) {
    const HeaderRead read = *workers.next();
    const ImageRecord& record = all_->records()[static_cast<size_t>(index)];
    if (!read.why.empty()) {
      by_header_.push_back({.name = in_utf8(record.name), .why = in_utf8(read.why)});
    } else if (read.num_bytes > 0) {
      records_.push_back(record);
      files_.push_back({.index = index, .num_bytes = read.num_bytes, .header = read.header});
    }
  }
}

// Puts the pictures that decoding showed to be broken where they were, whatever is now in their files.
void RunPictures::insert_removed(const Json& left_out) {
  for (const Json& picture : left_out) {
    if (!picture.contains("place")) continue;
    const int64_t place = picture.at("place");
    if (place < 0 || place > std::ssize(records_)) continue;  // other pictures are missing: not the same data
    ImageRecord record{.name = picture.at("picture"), .label = picture.at("label"), .captions = {}};
    for (const Json& caption : picture.at("captions"))
      record.captions.push_back(
          {.text = caption.at("text"), .kind = caption.at("kind"), .weight = caption.at("weight")});
    const auto found = std::ranges::find(all_->records(), record.name, &ImageRecord::name);
    const int64_t index = found == all_->records().end() ? -1 : found - all_->records().begin();
    records_.insert(records_.begin() + place, std::move(record));
    files_.insert(files_.begin() + place, {.index = index,
                                           .num_bytes = picture.at("bytes"),
                                           .header = {.height = picture.at("height"),
                                                      .width = picture.at("width"),
                                                      .orientation = picture.at("orientation")}});
    broken_.emplace(place, picture.at("why"));
  }
  num_broken_ = broken_.size();
}

PictureBytes RunPictures::bytes(int64_t index) const {
  const int64_t in_all = index_in_all(index);
  if (in_all < 0) throw BrokenPicture(*why_left_out(index));
  return all_->bytes(in_all);
}

std::vector<std::byte> RunPictures::read(int64_t index) const {
  if (const std::string* why = why_left_out(index)) throw BrokenPicture(*why);
  std::vector<std::byte> content = ImageDataset::read(index);
  check_content(index, content);
  return content;
}

const std::string* RunPictures::why_left_out(int64_t index) const {
  if (num_broken_ == 0) return nullptr;
  const std::lock_guard lock(mutex_);
  const auto found = broken_.find(index);
  return found == broken_.end() ? nullptr : &found->second;
}

void RunPictures::check_content(int64_t index, std::span<const std::byte> content) const {
  const uint64_t hash = std::max<uint64_t>(xxh3(content), 1);
  uint64_t before = 0;
  if (contents_[static_cast<size_t>(index)].compare_exchange_strong(before, hash))
    return remember(index, hash);
  if (before != hash)
    fail("loader",
         "the content of {} has changed since this run read it first: put the old file back, or go on with "
         "--continue-with FILE, which takes the pictures as they are",
         records_[static_cast<size_t>(index)].name);
}

// A hash that cannot be written, as on a full disk, is missing when the run resumes: that picture is compared
// from then on.
void RunPictures::remember(int64_t index, uint64_t hash) const {
  if (record_ < 0) return;
  const int64_t offset =
      index * static_cast<int64_t>(sizeof(Recorded)) + static_cast<int64_t>(offsetof(Recorded, content));
  [[maybe_unused]] const ssize_t written = ::pwrite(record_, &hash, sizeof hash, offset);
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

void RunPictures::record_in(const std::string& path, bool is_new) const {
  record_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | (is_new ? O_TRUNC : 0), 0666);
  if (record_ < 0) fail("train", "cannot write {}: {}", path, std::strerror(errno));
  const std::vector<Recorded> own = recorded();
  std::vector<Recorded> found(own.size());
  const auto num_bytes = static_cast<ssize_t>(own.size() * sizeof(Recorded));
  const bool is_whole = ::pread(record_, found.data(), static_cast<size_t>(num_bytes), 0) == num_bytes;
  if (is_whole && std::ranges::equal(own, found, {}, &Recorded::file, &Recorded::file)) {
    for (size_t i = 0; i < found.size(); ++i)
      if (found[i].content != 0) contents_[i] = found[i].content;
  } else if (::pwrite(record_, own.data(), static_cast<size_t>(num_bytes), 0) != num_bytes ||
             ::ftruncate(record_, num_bytes) != 0) {
    fail("train", "cannot write {}: {}", path, std::strerror(errno));
  }
}

std::string RunPictures::first_unrecorded(const std::string& path) const {
  std::unordered_set<uint64_t> found;
  std::ifstream file(path, std::ios::binary);
  for (Recorded entry; file.read(reinterpret_cast<char*>(&entry), sizeof entry);) found.insert(entry.file);
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
  for (const auto& [index, why] : broken_)
    all.push_back({.name = in_utf8(records_[static_cast<size_t>(index)].name), .why = why});
  return all;
}

std::vector<SkippedPicture> RunPictures::take_new_left_out() const {
  if (num_broken_ == 0) return {};
  const std::lock_guard lock(mutex_);
  return std::exchange(new_, {});
}

void RunPictures::leave_out(int64_t index, const std::string& why) const {
  const std::lock_guard lock(mutex_);
  if (!broken_.emplace(index, in_utf8(why)).second) return;
  num_broken_ = broken_.size();
  new_.push_back({.name = in_utf8(records_[static_cast<size_t>(index)].name), .why = in_utf8(why)});
  // Its file may be repaired.
  contents_[static_cast<size_t>(index)] = 0;
  remember(index, 0);
}

Json RunPictures::left_out() const {
  Json all = Json::array();
  for (const SkippedPicture& picture : by_header_)
    all.push_back({{"picture", picture.name}, {"why", picture.why}});
  const std::lock_guard lock(mutex_);
  for (const auto& [place, why] : broken_) {  // in the order of places, as insert_removed() needs it
    const ImageRecord& record = records_[static_cast<size_t>(place)];
    const File& file = files_[static_cast<size_t>(place)];
    Json captions = Json::array();
    for (const Caption& caption : record.captions)
      captions.push_back(
          {{"text", in_utf8(caption.text)}, {"kind", in_utf8(caption.kind)}, {"weight", caption.weight}});
    all.push_back({{"picture", in_utf8(record.name)},
                   {"why", why},
                   {"place", place},
                   {"label", record.label},
                   {"captions", std::move(captions)},
                   {"bytes", file.num_bytes},
                   {"height", file.header.height},
                   {"width", file.header.width},
                   {"orientation", file.header.orientation}});
  }
  return all;
}

void RunPictures::leave_out(const Json& of_another_rank) const {
  for (const Json& picture : of_another_rank)
    if (picture.contains("place")) leave_out(picture.at("place").get<int64_t>(), picture.at("why"));
}

}  // namespace kiln
