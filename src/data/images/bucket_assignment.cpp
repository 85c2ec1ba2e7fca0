#include "data/images/bucket_assignment.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "core/error.h"

namespace kiln {
namespace {

bool covers(const PictureSize& size, const Bucket& bucket) {
  return size.height >= bucket.height && size.width >= bucket.width;
}

std::string list_text(const std::vector<Bucket>& buckets) {
  std::string text;
  for (const Bucket& bucket : buckets)
    text += fmt::format("{}{}x{}", text.empty() ? "" : ", ", bucket.height, bucket.width);
  return text;
}

// The bucket that each remaining picture goes to, and which buckets join which.
struct Targets {
  std::vector<std::optional<size_t>> nearest;  // of each picture; none: the picture is left out
  std::vector<int64_t> counts;                 // of each bucket, before any joins another
  std::vector<size_t> target;                  // of each bucket
};

}  // namespace

int64_t BucketAssignment::num_pictures() const {
  int64_t sum = 0;
  for (const Filled& of_bucket : filled) sum += static_cast<int64_t>(of_bucket.pictures.size());
  return sum;
}

BucketAssignment assign_buckets(const std::vector<Bucket>& table, const std::vector<PictureSize>& sizes,
                                int64_t least, bool enlarge) {
  BucketAssignment assignment;
  Targets targets{.nearest = std::vector<std::optional<size_t>>(sizes.size()), .counts = {}, .target = {}};
  for (size_t i = 0; i < sizes.size(); ++i)
    if (sizes[i].is_known()) targets.nearest[i] = nearest_bucket(table, sizes[i].height, sizes[i].width);
  for (bool has_changed = true; has_changed;) {
    targets.counts.assign(table.size(), 0);
    for (const auto& nearest : targets.nearest)
      if (nearest) ++targets.counts[*nearest];
    targets.target = merge_small_buckets(table, targets.counts, least);
    // A bucket that loses pictures, because they do not cover it, may have become small itself.
    has_changed = false;
    for (size_t i = 0; i < sizes.size() && !enlarge; ++i) {
      auto& nearest = targets.nearest[i];
      if (!nearest || covers(sizes[i], table[targets.target[*nearest]])) continue;
      assignment.too_small.push_back(static_cast<int64_t>(i));
      nearest.reset();
      has_changed = true;
    }
  }
  std::sort(assignment.too_small.begin(), assignment.too_small.end());

  std::vector<BucketAssignment::Filled> all(table.size());
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (!targets.nearest[i]) continue;
    const size_t target = targets.target[*targets.nearest[i]];
    all[target].pictures.push_back(static_cast<int64_t>(i));
    all[target].num_joined += target != *targets.nearest[i];
  }
  for (size_t b = 0; b < table.size(); ++b) {
    all[b].bucket = table[b];
    if (targets.counts[b] == 0) assignment.empty.push_back(table[b]);
    if (targets.target[b] != b) assignment.joined.push_back(table[b]);
    if (!all[b].pictures.empty()) assignment.filled.push_back(std::move(all[b]));
  }
  if (const int64_t num_pictures = assignment.num_pictures(); num_pictures > 0 && num_pictures < least)
    fail("buckets", "--bucket-min {} is more than the {} pictures that can be used", least, num_pictures);
  return assignment;
}

std::string not_covering_text(const std::string& name, const PictureSize& size) {
  return fmt::format("{} is too small: {} x {}, its bucket would enlarge it", name, size.width, size.height);
}

std::string assignment_text(const BucketAssignment& assignment) {
  const auto total = static_cast<double>(assignment.num_pictures());
  std::string text = fmt::format("{:>11}  {:>5}  {:>10}  {:>7}\n", "bucket", "ratio", "pictures", "share");
  for (const auto& [bucket, pictures, num_joined] : assignment.filled)
    text += fmt::format("{:>11}  {:>5.2f}  {:>10}  {:>5.1f} %{}\n",
                        fmt::format("{}x{}", bucket.height, bucket.width), bucket.aspect_ratio,
                        pictures.size(), 100 * static_cast<double>(pictures.size()) / total,
                        num_joined > 0 ? fmt::format("  {} of them from small buckets", num_joined) : "");
  if (!assignment.joined.empty())
    text += fmt::format("small buckets that joined others: {}\n", list_text(assignment.joined));
  constexpr size_t kMostListed = 8;
  if (const size_t count = assignment.empty.size(); count > kMostListed)
    text += fmt::format("{} buckets of the table are without pictures, and left out\n", count);
  else if (count > 0)
    text += fmt::format("without pictures, and left out: {}\n", list_text(assignment.empty));
  return text;
}

Image load_covering(const ImageDataset& dataset, int64_t index, const PictureSize& size,
                    const BucketCrop& crop) {
  const Image image = dataset.load(index, crop.orient);
  if (image.height != size.height || image.width != size.width)
    throw BrokenPicture(
        fmt::format("the picture {} has another size than its header says: {} x {}, expected {} x {}",
                    dataset.records()[index].name, image.width, image.height, size.width, size.height));
  return cover_crop(image, crop.bucket.height, crop.bucket.width,
                    crop.lanczos ? Resampling::kLanczos : Resampling::kBicubic);
}

}  // namespace kiln
