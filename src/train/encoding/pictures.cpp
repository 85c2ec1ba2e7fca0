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

Pictures open_pictures(const TrainOptions& options, const std::string& path, int64_t downsample,
                       const std::vector<Bucket>& among) {
  const DataOptions& data = options.data;
  if (!data.buckets.empty()) table_of(data, downsample);
  Pictures pictures{.images = ImageDataset::open(path), .lanes = nullptr};
  ProcessGroup alone;  // every rank reads all headers and sees the same
  pictures.lanes = std::make_shared<const PictureLanes>(
      PictureLaneOptions{.data = path,
                         .image_size = data.image_size,
                         .buckets = data.buckets,
                         .among = among,
                         .bucket_min = among.empty() ? data.bucket_min : 1,
                         .enlarge = data.enlarge,
                         .num_threads = static_cast<int>(data.loader_threads)},
      *pictures.images, downsample, alone);
  return pictures;
}

std::vector<Lane> planned_lanes(const TrainOptions& options, int64_t downsample) {
  const int64_t side = options.data.image_size / downsample;
  if (options.data.buckets.empty()) return {{.height = side, .width = side}};
  std::vector<Lane> lanes;
  for (const Bucket& bucket : table_of(options.data, downsample))
    lanes.push_back({.height = bucket.height / downsample,
                     .width = bucket.width / downsample,
                     .aspect_ratio = bucket.aspect_ratio});
  return lanes;
}

std::vector<std::string> picture_notes(const Pictures& pictures, const std::string& path) {
  const std::vector<std::string>& complaints = pictures.lanes->complaints();
  if (complaints.empty()) return {};
  return {
      fmt::format("{} of the {} pictures in {} are left out, broken or smaller than their bucket{}; the "
                  "first: {}",
                  complaints.size(), pictures.images->records().size(), path,
                  pictures.lanes->takes_small() ? "" : " (--enlarge takes small ones, as PixArt does)",
                  complaints.front())};
}

}  // namespace kiln
