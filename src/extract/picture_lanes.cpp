#include "extract/picture_lanes.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "core/error.h"
#include "core/files/xxh3.h"
#include "core/progress_line.h"
#include "data/images/ordered_workers.h"
#include "parallel/ranks/agreement.h"

namespace kiln {
namespace {

constexpr const char* kPublished = "pixart";
constexpr int64_t kLanczosFrom = 2048;  // pixels; the base of the table from which PixArt's trainer takes it

// The side of the square that has the mean area of the buckets, in steps of `multiple`.
int64_t side_of(const std::vector<Bucket>& buckets, int64_t multiple) {
  double area = 0;
  for (const Bucket& bucket : buckets) area += static_cast<double>(bucket.height * bucket.width);
  const double side = std::sqrt(area / static_cast<double>(buckets.size()));
  return std::max<int64_t>(std::llround(side / static_cast<double>(multiple)), 1) * multiple;
}

struct HeaderResult {
  PictureSize size{};
  std::string error{};
};

}  // namespace

PictureLanes::PictureLanes(const ExtractOptions& options, const ExtractSettings& settings,
                           const ImageDataset& dataset, int64_t downsample, ProcessGroup& group)
    : options_(options), dataset_(dataset), image_size_(options.image_size) {
  if (options.buckets.empty())
    make_square();
  else
    make_buckets(downsample, settings.num_workers, group);
}

void PictureLanes::make_square() {
  pictures_.resize(dataset_.records().size());
  std::iota(pictures_.begin(), pictures_.end(), int64_t{0});
  shapes_ = {{.height = image_size_, .width = image_size_, .last = num_places()}};
}

void PictureLanes::make_buckets(int64_t downsample, int num_threads, ProcessGroup& group) {
  const std::vector<Bucket> table = parse_buckets(options_.buckets, options_.image_size, downsample);
  for (const Bucket& bucket : table)
    if (bucket.height > kMaxImagePixels / bucket.width)
      fail("extract", "--buckets: expected at most {} pixels, got {}x{}", kMaxImagePixels, bucket.height,
           bucket.width);
  if (image_size_ == 0) image_size_ = side_of(table, downsample);
  read_sizes(num_threads, group);
  BucketAssignment assignment = assign_buckets(table, sizes_, options_.bucket_min, options_.enlarge);
  report(assignment, group);
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
void PictureLanes::read_sizes(int num_threads, ProcessGroup& group) {
  const auto num_pictures = static_cast<int64_t>(dataset_.records().size());
  const int64_t first = num_pictures * group.rank() / group.world_size(),
                last = num_pictures * (group.rank() + 1) / group.world_size();
  std::vector<double> sides(static_cast<size_t>(2 * num_pictures));
  agree(group, "the sizes of the pictures", [&] {
    if (group.rank() == 0) fmt::print(stderr, "reading the sizes of {} pictures\n", num_pictures);
    const auto read_size = [&](int64_t index) -> HeaderResult {
      try {
        ImageHeader header = dataset_.header(index);
        if (options_.exif_orientation == "ignore") header.orientation = 1;
        return {.size = {.height = header.upright_height(), .width = header.upright_width()}};
      } catch (const Error& error) {
        return {.error = error.what()};
      }
    };
    constexpr int64_t kAhead = 4096;
    OrderedWorkers<HeaderResult> workers(first, last, num_threads, kAhead, read_size);
    ProgressLine progress(0, last - first, /*is_shown=*/group.rank() == 0);
    int64_t num_broken = 0;
    for (int64_t index = first; index < last; ++index) {
      const HeaderResult result = *workers.next();
      if (!result.error.empty()) {
        if (options_.strict) fail("extract", "{} (--strict)", result.error);
        ++num_broken;
        progress.clear();
        fmt::print(stderr, "skipped: {}\n", result.error);
      }
      sides[static_cast<size_t>(2 * index)] = static_cast<double>(result.size.height);
      sides[static_cast<size_t>(2 * index + 1)] = static_cast<double>(result.size.width);
      progress.update(static_cast<double>(index + 1 - first), num_broken);
    }
    progress.finish(last - first, num_broken);
  });
  sides = group.sum(std::move(sides), "the sizes of the pictures");
  for (size_t i = 0; i < sides.size(); i += 2)
    sizes_.push_back({.height = static_cast<int64_t>(sides[i]), .width = static_cast<int64_t>(sides[i + 1])});
}

void PictureLanes::report(const BucketAssignment& assignment, ProcessGroup& group) const {
  const bool is_first = group.rank() == 0;
  for (const int64_t index : assignment.too_small) {
    const PictureSize& size = sizes_[static_cast<size_t>(index)];
    const std::string complaint =
        fmt::format("{} is too small: {} x {}, its bucket would enlarge it",
                    dataset_.records()[static_cast<size_t>(index)].name, size.width, size.height);
    if (options_.strict) fail("extract", "{} (--strict)", complaint);
    if (is_first) fmt::print(stderr, "skipped: {}\n", complaint);
  }
  if (assignment.filled.empty()) refuse_all();
  if (!is_first) return;
  fmt::print("{}", assignment_text(assignment));
  std::fflush(stdout);
}

void PictureLanes::refuse_all() const {
  fail("extract", "none of the {} pictures in {} can be used: they are broken{}", dataset_.records().size(),
       options_.data,
       options_.enlarge ? ""
       : has_buckets()
           ? " or smaller than their bucket (--enlarge takes small ones, as PixArt does)"
           : fmt::format(" or smaller than --image-size {} (--enlarge takes small ones, as DiT does)",
                         image_size_));
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

std::array<int64_t, 2> PictureLanes::image_hw(int64_t place) const {
  if (!has_buckets()) return {};
  const PictureSize& size = sizes_[static_cast<size_t>(picture(place))];
  return {size.height, size.width};
}

Image PictureLanes::load(int64_t place) const {
  const bool orient = options_.exif_orientation == "apply";
  const int64_t index = picture(place);
  if (!has_buckets())
    return load_cropped(dataset_, index,
                        {.size = options_.image_size, .enlarge = options_.enlarge, .orient = orient});
  const Shape& shape = shapes_[static_cast<size_t>(lane_of(place))];
  return load_covering(dataset_, index, sizes_[static_cast<size_t>(index)],
                       {.bucket = {.height = shape.height, .width = shape.width},
                        .lanczos = options_.buckets == kPublished && options_.image_size >= kLanczosFrom,
                        .orient = orient});
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

std::string PictureLanes::fingerprint() const {
  std::string text;
  for (int64_t place = 0; place < num_places(); ++place) {
    const auto [height, width] = image_hw(place);
    text += fmt::format("{} {} {} {}\n", lane_of(place), picture(place), height, width);
  }
  return xxh3_hex(std::as_bytes(std::span(text)));
}

}  // namespace kiln
