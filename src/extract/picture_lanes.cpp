#include "extract/picture_lanes.h"

#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "core/files/input_file.h"
#include "core/files/xxh3.h"
#include "core/text/progress_line.h"
#include "data/images/image_header.h"
#include "data/images/ordered_workers.h"
#include "parallel/ranks/agreement.h"

namespace kiln {
namespace {

constexpr const char* kPublished = "pixart";
constexpr int64_t kLanczosFrom = 2048;  // PixArt's trainer uses Lanczos for tables from this base on

struct HeaderResult {
  PictureSize size{};
  std::string error{};
};

std::array<float, 256> make_values() {
  std::array<float, 256> values;
  for (int level = 0; level < 256; ++level)
    values[level] = (static_cast<float>(level) / 255.0f - 0.5f) / 0.5f;
  return values;
}

}  // namespace

PictureLanes::PictureLanes(const PictureLaneOptions& options, const ImageDataset& dataset, int64_t downsample,
                           ProcessGroup& group)
    : options_(options), dataset_(dataset), downsample_(downsample), image_size_(options.image_size) {
  if (options.buckets.empty() || image_size_ != 0) check_image_size(downsample, image_size_);
  if (options.buckets.empty())
    make_square();
  else
    make_buckets(group);
}

void PictureLanes::make_square() {
  pictures_.resize(dataset_.records().size());
  std::iota(pictures_.begin(), pictures_.end(), int64_t{0});
  shapes_ = {{.height = image_size_, .width = image_size_, .last = num_places()}};
}

void PictureLanes::make_buckets(ProcessGroup& group) {
  const std::vector<Bucket> table = options_.among.empty()
                                        ? parse_buckets(options_.buckets, options_.image_size, downsample_)
                                        : options_.among;
  for (const Bucket& bucket : table)
    if (bucket.height > kMaxImagePixels / bucket.width)
      fail("buckets", "--buckets: expected at most {} pixels, got {}x{}", kMaxImagePixels, bucket.height,
           bucket.width);
  if (image_size_ == 0) image_size_ = side_of(table, downsample_);
  read_sizes(group);
  BucketAssignment assignment = assign_buckets(table, sizes_, options_.bucket_min, options_.enlarge);
  describe(assignment, group.rank() == 0);
  for (BucketAssignment::Filled& filled : assignment.filled) {
    const int64_t first = num_places();
    pictures_.insert(pictures_.end(), filled.pictures.begin(), filled.pictures.end());
    shapes_.push_back({.height = filled.bucket.height,
                       .width = filled.bucket.width,
                       .aspect_ratio = filled.bucket.aspect_ratio,
                       .first = first,
                       .last = num_places()});
  }
  num_left_out_ = static_cast<int64_t>(sizes_.size()) - num_places();
}

// Each rank reads the headers of its share. A picture whose header cannot be read keeps size 0 x 0.
void PictureLanes::read_sizes(ProcessGroup& group) {
  const auto num_pictures = static_cast<int64_t>(dataset_.records().size());
  const int64_t first = num_pictures * group.rank() / group.world_size(),
                last = num_pictures * (group.rank() + 1) / group.world_size();
  std::vector<double> sides(static_cast<size_t>(2 * num_pictures));
  agree(group, "the sizes of the pictures", [&] {
    const bool is_shown = options_.shows_progress && group.rank() == 0;
    if (is_shown) fmt::print(stderr, "reading the sizes of {} pictures\n", num_pictures);
    const auto read_size = [&](int64_t index) -> HeaderResult {
      try {
        ImageHeader header = dataset_.header(index);
        if (!options_.orient) header.orientation = 1;
        return {.size = {.height = header.upright_height(), .width = header.upright_width()}};
      } catch (const BrokenPicture& error) {
        return {.error = message_of(error)};
      } catch (const NoSuchFile& error) {
        return {.error = message_of(error)};
      }
    };
    constexpr int64_t kAhead = 4096;
    OrderedWorkers<HeaderResult> workers(first, last, options_.num_threads, kAhead, read_size);
    ProgressLine progress(0, last - first, is_shown);
    for (int64_t index = first; index < last; ++index) {
      const HeaderResult result = *workers.next();
      if (!result.error.empty()) {
        if (options_.strict) fail("extract", "{} (--strict)", result.error);
        skipped_.push_back(
            {.name = dataset_.records()[static_cast<size_t>(index)].name, .why = result.error});
      }
      sides[static_cast<size_t>(2 * index)] = static_cast<double>(result.size.height);
      sides[static_cast<size_t>(2 * index + 1)] = static_cast<double>(result.size.width);
      progress.update(static_cast<double>(index + 1 - first), std::ssize(skipped_));
    }
    progress.finish(last - first, std::ssize(skipped_));
  });
  sides = group.sum(std::move(sides), "the sizes of the pictures");
  for (size_t i = 0; i < sides.size(); i += 2)
    sizes_.push_back({.height = static_cast<int64_t>(sides[i]), .width = static_cast<int64_t>(sides[i + 1])});
}

void PictureLanes::describe(const BucketAssignment& assignment, bool is_first) {
  for (const int64_t index : assignment.too_small) {
    const PictureSize& size = sizes_[static_cast<size_t>(index)];
    const std::string& name = dataset_.records()[static_cast<size_t>(index)].name;
    const std::string why = not_covering_text(name, size);
    if (options_.strict) fail("extract", "{} (--strict)", why);
    if (is_first) skipped_.push_back({.name = name, .why = why});
  }
  if (assignment.filled.empty()) refuse_all();
  table_text_ = assignment_text(assignment);
}

void PictureLanes::refuse_all() const {
  fail(has_buckets() ? "buckets" : "extract",
       "none of the {} pictures in {} can be used: they are broken{}{}", dataset_.records().size(),
       options_.data,
       options_.enlarge ? ""
       : has_buckets()
           ? " or smaller than their bucket (--enlarge takes small ones, as PixArt does)"
           : fmt::format(" or smaller than --image-size {} (--enlarge takes small ones, as DiT does)",
                         image_size_),
       skipped_.empty() ? "" : fmt::format("; the first: {}", skipped_.front().why));
}

std::string PictureLanes::skipped_text(int64_t num_skipped) const {
  if (num_skipped == 0) return "";
  const std::string begin =
      fmt::format("{} of {} pictures are broken", num_skipped, dataset_.records().size());
  if (options_.enlarge) return begin + " and were skipped\n";
  return begin +
         (has_buckets()
              ? std::string(" or smaller than their bucket and were skipped (--enlarge takes the small "
                            "ones, as PixArt does)\n")
              : fmt::format(" or smaller than {} pixels and were skipped (--enlarge takes the small "
                            "ones, as DiT does)\n",
                            image_size_));
}

int64_t PictureLanes::lane_of(int64_t place) const {
  const auto after = std::upper_bound(shapes_.begin(), shapes_.end(), place,
                                      [](int64_t p, const Shape& shape) { return p < shape.first; });
  return after - shapes_.begin() - 1;
}

std::array<int64_t, 2> PictureLanes::image_hw(int64_t picture) const {
  if (!has_buckets()) return {};
  const PictureSize& size = sizes_[static_cast<size_t>(picture)];
  return {size.height, size.width};
}

Image PictureLanes::load(int64_t picture, int64_t lane) const {
  if (!has_buckets())
    return load_cropped(
        dataset_, picture,
        {.size = options_.image_size, .enlarge = options_.enlarge, .orient = options_.orient});
  const Shape& shape = shapes_[static_cast<size_t>(lane)];
  return load_covering(dataset_, picture, sizes_[static_cast<size_t>(picture)],
                       {.bucket = {.height = shape.height, .width = shape.width},
                        .lanczos = options_.buckets == kPublished && options_.image_size >= kLanczosFrom,
                        .orient = options_.orient});
}

std::vector<Bucket> PictureLanes::buckets() const {
  std::vector<Bucket> buckets;
  for (const Shape& shape : shapes_)
    if (has_buckets())
      buckets.push_back({.height = shape.height, .width = shape.width, .aspect_ratio = shape.aspect_ratio});
  return buckets;
}

std::vector<Lane> PictureLanes::latent_lanes() const {
  std::vector<Lane> lanes;
  for (const Shape& shape : shapes_)
    lanes.push_back({.height = shape.height / downsample_,
                     .width = shape.width / downsample_,
                     .aspect_ratio = shape.aspect_ratio});
  return lanes;
}

std::vector<SampleLane> PictureLanes::sample_lanes() const {
  if (!has_buckets()) return {{.samples = {{.first = 0, .count = num_places()}}}};
  std::vector<SampleLane> lanes;
  for (const Shape& shape : shapes_)
    lanes.push_back({.samples = {{.first = picture(shape.first),
                                  .count = shape.last - shape.first,
                                  .chosen = std::make_shared<const std::vector<int64_t>>(
                                      pictures_.begin() + shape.first, pictures_.begin() + shape.last)}}});
  return lanes;
}

PictureLanes::Range PictureLanes::of_rank(int64_t rank, int64_t world_size, int64_t batch) const {
  int64_t num_batches = 0;
  for (const Shape& shape : shapes_) num_batches += (shape.last - shape.first + batch - 1) / batch;
  const auto begin_of = [&](int64_t index) {
    for (const Shape& shape : shapes_) {
      const int64_t here = (shape.last - shape.first + batch - 1) / batch;
      if (index < here) return shape.first + index * batch;
      index -= here;
    }
    return num_places();
  };
  return {.first = begin_of(num_batches * rank / world_size),
          .last = begin_of(num_batches * (rank + 1) / world_size)};
}

std::string PictureLanes::fingerprint(const std::function<int64_t(int64_t picture)>& number_of) const {
  std::string text;
  for (int64_t place = 0; place < num_places(); ++place) {
    const auto [height, width] = image_hw(picture(place));
    const int64_t number = number_of ? number_of(picture(place)) : picture(place);
    text += fmt::format("{} {} {} {}\n", lane_of(place), number, height, width);
  }
  return xxh3_hex(std::as_bytes(std::span(text)));
}

void check_image_size(int64_t downsample, int64_t image_size) {
  constexpr int64_t kMostPixels = 65536;
  if (image_size < 1 || image_size > kMostPixels)
    fail("autoencoder", "expected --image-size to be 1 to {}, got {}", kMostPixels, image_size);
  if (image_size % downsample != 0)
    fail("autoencoder", "expected --image-size to be a multiple of {}, got {}", downsample, image_size);
}

void write_image_values(const Image& image, bool mirrored, std::span<float> out) {
  static const std::array<float, 256> kValues = make_values();
  const int64_t plane = image.height * image.width;
  const uint8_t* pixel = image.rgb.data();
  for (int64_t y = 0; y < image.height; ++y) {
    for (int64_t x = 0; x < image.width; ++x, pixel += 3) {
      const int64_t at = y * image.width + (mirrored ? image.width - 1 - x : x);
      for (int64_t c = 0; c < 3; ++c) out[c * plane + at] = kValues[pixel[c]];
    }
  }
}

}  // namespace kiln
