#include "data/store/other_caches.h"

#include <algorithm>
#include <filesystem>

#include "core/error.h"
#include "core/json.h"
#include "core/text/json_text.h"
#include "data/images/bucket_table.h"

namespace kiln {
namespace {

constexpr int64_t kDownsample = 8;
constexpr int64_t kMostPixels = int64_t{1} << 24;  // of a side

int64_t side_of(const nlohmann::json& picture, const char* key, const std::string& where) {
  const auto side = picture.find(key);
  if (side == picture.end() || !is_integer(*side) || side->get<int64_t>() < 1 ||
      side->get<int64_t>() > kMostPixels)
    fail("store import", "expected a {} in pixels ({})", key, where);
  return side->get<int64_t>();
}

}  // namespace

PixartList::PixartList(const std::string& path) : path_(path) {
  const nlohmann::json list = read_json_file("store import", path, kLongList);
  if (!list.is_array()) fail("store import", "expected a JSON list of pictures, got none ({})", path);
  for (const auto& entry : list) {
    const std::string where = fmt::format("{}, picture {}", path, pictures_.size());
    const auto name = entry.is_object() ? entry.find("path") : entry.end();
    if (!entry.is_object() || name == entry.end() || !name->is_string())
      fail("store import", "expected an object with a path ({})", where);
    Picture picture{.path = name->get<std::string>(),
                    .image_hw = {side_of(entry, "height", where), side_of(entry, "width", where)},
                    .prompt = {}};
    if (const auto prompt = entry.find("prompt"); prompt != entry.end() && prompt->is_string())
      picture.prompt = prompt->get<std::string>();
    // tools/extract_features.py cuts the name at its first dot, the trainers at the last.
    const std::filesystem::path place(picture.path);
    const std::string base = place.filename().string(), folder = place.parent_path().string();
    std::vector<std::string> files = {base.substr(0, base.find('.')), place.stem().string()};
    if (!folder.empty())
      for (const char* joint : {"_", "/"}) files.push_back(folder + joint + place.stem().string());
    std::sort(files.begin(), files.end());
    files.erase(std::unique(files.begin(), files.end()), files.end());
    for (const std::string& stem : files) by_file_[stem + ".npy"].push_back(pictures_.size());
    pictures_.push_back(std::move(picture));
  }
}

const PixartList::Picture& PixartList::of_latents(const std::string& file) const {
  const auto found = by_file_.find(file);
  if (found == by_file_.end())
    fail("store import", "{} belongs to no picture in {}: give the list that it was made from", file, path_);
  if (found->second.size() > 1)
    fail("store import",
         "{} may belong to {} or to {} in {}: their names are the same without folder and extension", file,
         pictures_[found->second[0]].path, pictures_[found->second[1]].path, path_);
  return pictures_[found->second[0]];
}

Lane pixart_lane(int64_t height, int64_t width, int64_t image_size) {
  Bucket bucket = parse_buckets(fmt::format("{}x{}", height * kDownsample, width * kDownsample), 0, 1)[0];
  if (image_size == 256 || image_size == 512 || image_size == 1024 || image_size == 2048 ||
      image_size == 2880)
    for (const Bucket& published : published_buckets(image_size))
      if (published.height == bucket.height && published.width == bucket.width) bucket = published;
  return {.height = height, .width = width, .aspect_ratio = bucket.aspect_ratio};
}

}  // namespace kiln
