#include "evaluate/picture_set.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <span>

#include "core/aten.h"
#include "core/error.h"
#include "core/files/xxh3.h"
#include "evaluate/npz_archive.h"

namespace kiln {
namespace {

std::span<const std::byte> bytes_of(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()};
}

// Returns the sum of the pictures' checksums. It does not depend on batches or ranks.
uint64_t checksum_of(const at::Tensor& pictures) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < pictures.size(0); ++i) sum += xxh3(bytes_of(pictures.select(0, i)));
  return sum;
}

FeatureStatistics merged(ProcessGroup& group, const FeatureStatistics& mine, const std::string& what) {
  if (group.world_size() == 1) return mine;
  FeatureStatistics all;
  for (const std::string& bytes : group.gather(mine.to_bytes(), what))
    all.merge(FeatureStatistics::from_bytes(bytes));
  return all;
}

// Joins the rows of all ranks, in rank order.
at::Tensor joined(ProcessGroup& group, const std::vector<at::Tensor>& mine) {
  if (group.world_size() == 1) return at::cat(mine);
  std::string bytes;
  for (const at::Tensor& part : mine) {
    const int64_t width = part.size(1);
    if (bytes.empty()) bytes.assign(reinterpret_cast<const char*>(&width), sizeof width);
    bytes.append(static_cast<const char*>(part.const_data_ptr()), part.nbytes());
  }
  std::vector<at::Tensor> parts;
  for (const std::string& of_rank : group.gather(bytes, "the features of pictures")) {
    if (of_rank.empty()) continue;
    int64_t width = 0;
    std::memcpy(&width, of_rank.data(), sizeof width);
    const size_t size = of_rank.size() - sizeof width;
    at::Tensor part =
        at::empty({static_cast<int64_t>(size / sizeof(float)) / width, width}, at::TensorOptions(at::kFloat));
    std::memcpy(part.data_ptr(), of_rank.data() + sizeof width, size);
    parts.push_back(part);
  }
  return at::cat(parts);
}

InceptionScore summed(ProcessGroup& group, InceptionScoreSums& mine, int64_t num_splits) {
  if (group.world_size() > 1) {
    const at::Tensor sums = mine.sums();
    const std::vector<double> values = group.sum(
        {sums.const_data_ptr<double>(), sums.const_data_ptr<double>() + sums.numel()}, "Inception Scores");
    mine.sums() = at::tensor(values, at::kDouble).view({num_splits, -1});
  }
  return mine.finish();
}

uint64_t summed(ProcessGroup& group, uint64_t mine) {
  uint64_t sum = 0;
  for (const std::string& text : group.gather(std::to_string(mine), "the pictures' checksum"))
    sum += std::stoull(text);
  return sum;
}

}  // namespace

PictureSetSums::PictureSetSums(const PictureSetNeeds& needs, int64_t num_pictures) : needs_(needs) {
  if (needs.score_splits > 0) score_.emplace(num_pictures, needs.score_splits);
}

void PictureSetSums::add(const std::vector<int64_t>& indices, const at::Tensor& pictures,
                         const PictureFeatures& made) {
  num_added_ += pictures.size(0);
  checksum_ += checksum_of(pictures);
  if (needs_.gaussian) gaussian_.add(made.features);
  if (needs_.spatial) spatial_.add(made.spatial);
  if (needs_.features) features_.push_back(made.features.to(at::kCPU, at::kFloat).contiguous());
  if (!score_) return;
  for (size_t i = 0; i < indices.size(); ++i)
    score_->add(indices[i], made.logits.narrow(0, static_cast<int64_t>(i), 1));
}

PictureSet PictureSetSums::finish(ProcessGroup& group) {
  const double count = group.sum({static_cast<double>(num_added_)}, "the number of pictures").front();
  PictureSet set{.count = static_cast<int64_t>(count),
                 .fingerprint = fmt::format("pixels:{:016x}", summed(group, checksum_))};
  if (needs_.gaussian) set.gaussian = merged(group, gaussian_, "the statistics of features").finish();
  if (needs_.spatial) set.spatial = merged(group, spatial_, "the statistics of spatial features").finish();
  if (score_) set.score = summed(group, *score_, needs_.score_splits);
  if (needs_.features) set.features = joined(group, features_);
  return set;
}

PictureSet measure_pictures(const FeatureNet& net, PictureSource& source, const PictureSetNeeds& needs,
                            const ExtractionOptions& options, ProcessGroup& group) {
  const int64_t count = options.num_pictures > 0 ? options.num_pictures : source.size();
  if (count > source.size() || count < group.world_size())
    fail("evaluate", "expected at least {} pictures, got {}", std::max(count, group.world_size()),
         source.size());
  if (options.batch < 1) fail("evaluate", "expected a batch of at least 1 picture, got {}", options.batch);
  const int64_t first = group.rank() * count / group.world_size(),
                last = (group.rank() + 1) * count / group.world_size();
  PictureSetSums sums(needs, count);
  source.for_each_batch(first, last, options.batch, [&](int64_t begin, const at::Tensor& pictures) {
    std::vector<int64_t> indices(static_cast<size_t>(pictures.size(0)));
    std::iota(indices.begin(), indices.end(), begin);
    sums.add(indices, pictures, net.forward(pictures));
    if (options.progress) options.progress(begin + pictures.size(0) - first, last - first);
  });
  return sums.finish(group);
}

namespace {

std::optional<GaussianStatistics> statistics_of(const NpzArchive& archive, const std::string& path,
                                                const std::string& mean, const std::string& covariance) {
  if (!archive.has(mean) || !archive.has(covariance)) return std::nullopt;
  GaussianStatistics statistics{.mu = archive.read(mean), .sigma = archive.read(covariance)};
  const int64_t width = statistics.mu.numel();
  if (statistics.mu.dim() != 1 || statistics.sigma.dim() != 2 || statistics.sigma.size(0) != width ||
      statistics.sigma.size(1) != width)
    fail("evaluate", "expected {} (D) and {} (D, D) in {}", mean, covariance, path);
  return statistics;
}

}  // namespace

PictureSet read_statistics(const std::string& path) {
  const NpzArchive archive(path);
  PictureSet set{.gaussian = statistics_of(archive, path, "mu", "sigma"),
                 .spatial = statistics_of(archive, path, "mu_s", "sigma_s")};
  if (!set.gaussian && !set.spatial)
    fail("evaluate", "{} holds neither pictures (arr_0) nor statistics (mu and sigma)", path);
  std::string parts;
  for (const auto& statistics : {set.gaussian, set.spatial})
    if (statistics)
      parts += xxh3_hex(bytes_of(statistics->mu)) + xxh3_hex(bytes_of(statistics->sigma.contiguous()));
  set.fingerprint = "statistics:" + xxh3_hex(std::as_bytes(std::span(parts)));
  return set;
}

void write_statistics(const std::string& path, const PictureSet& set) {
  std::map<std::string, at::Tensor> arrays;
  if (set.gaussian) {
    arrays["mu"] = set.gaussian->mu;
    arrays["sigma"] = set.gaussian->sigma;
  }
  if (set.spatial) {
    arrays["mu_s"] = set.spatial->mu;
    arrays["sigma_s"] = set.spatial->sigma;
  }
  write_npz(path, arrays);
}

}  // namespace kiln
