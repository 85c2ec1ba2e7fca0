#include "train/encoding/pictures.h"

#include <algorithm>

#include "core/error.h"
#include "parallel/ranks/process_group.h"

namespace kiln {

namespace {

// Returns the table of buckets. Throws Error if --image-size is outside of its sides: the model is made for
// pictures of about --image-size.
std::vector<Bucket> table_of(const DataOptions& options, int64_t downsample) {
  std::vector<Bucket> table = parse_buckets(options.buckets, options.image_size, downsample);
  int64_t least = table[0].height, most = least;
  for (const Bucket& bucket : table) {
    least = std::min({least, bucket.height, bucket.width});
    most = std::max({most, bucket.height, bucket.width});
  }
  if (options.image_size < least || options.image_size > most)
    fail("train", "--image-size {} does not fit --buckets {}, whose sides are {} to {}: give --image-size {}",
         options.image_size, options.buckets, least, most, side_of(table, downsample));
  return table;
}

}  // namespace

Pictures open_pictures(const DataOptions& options, const std::string& path, int64_t downsample,
                       const std::vector<Bucket>& among, const char* of) {
  if (!options.buckets.empty()) table_of(options, downsample);
  constexpr int kLeastThreads = 8;  // headers are small: what takes time is the wait for each
  const auto num_threads = static_cast<int>(std::max<int64_t>(options.loader_threads, kLeastThreads));
  const Pictures pictures{
      .images = std::make_shared<const RunPictures>(
          ImageDataset::open(path),
          RunPictures::Options{
              .least_side = options.buckets.empty() && !options.enlarge ? options.image_size : 0,
              .num_threads = num_threads,
              .left_out = nlohmann::json::parse(options.left_out.empty() ? "[]" : options.left_out),
              .of = of}),
      .lanes = nullptr};
  if (pictures.images->records().empty())
    fail("train", "none of the {} pictures in {} can be used, the first: {}",
         pictures.images->all().records().size(), path, pictures.images->all_left_out().front().why);
  ProcessGroup alone;  // every rank reads all headers and sees the same
  auto lanes = std::make_shared<const PictureLanes>(
      PictureLaneOptions{.data = path,
                         .image_size = options.image_size,
                         .buckets = options.buckets,
                         .among = among,
                         .bucket_min = among.empty() ? options.bucket_min : 1,
                         .enlarge = options.enlarge,
                         .num_threads = num_threads},
      *pictures.images, downsample, alone);
  return {.images = pictures.images, .lanes = std::move(lanes)};
}

std::vector<Lane> planned_lanes(const DataOptions& options, int64_t downsample) {
  const int64_t side = options.image_size / downsample;
  if (options.buckets.empty()) return {{.height = side, .width = side}};
  std::vector<Lane> lanes;
  for (const Bucket& bucket : table_of(options, downsample))
    lanes.push_back({.height = bucket.height / downsample,
                     .width = bucket.width / downsample,
                     .aspect_ratio = bucket.aspect_ratio});
  return lanes;
}

std::vector<std::string> picture_notes(const Pictures& pictures, const std::string& path) {
  std::vector<std::string> notes = pictures.images->notes();
  std::string first;
  size_t count = 0;
  const auto add = [&](const auto& left_out) {
    if (count == 0 && !left_out.empty()) first = left_out.front().why;
    count += left_out.size();
  };
  add(pictures.images->all_left_out());
  add(pictures.lanes->skipped());
  if (count > 0)
    notes.push_back(fmt::format(
        "{} of the {} pictures in {} are left out, broken or too small{}; the first: {}", count,
        pictures.images->all().records().size(), path,
        pictures.images->had_left_out() ? ", also if repaired since (--continue-with FILE takes them in then)"
        : pictures.lanes->takes_small() ? ""
                                        : " (--enlarge takes small ones, as DiT and PixArt do)",
        first));
  return notes;
}

}  // namespace kiln
