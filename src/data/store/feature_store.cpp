#include "data/store/feature_store.h"

#include <algorithm>
#include <filesystem>

#include "core/error.h"
#include "core/files/mapped_file.h"
#include "core/files/xxh3.h"
#include "data/store/latent_kernels.h"
#include "data/store/store_shard.h"

namespace kiln {
namespace {

std::string shard_path(const std::string& folder, const StoreInfo::Shard& shard) {
  return (std::filesystem::path(folder) / shard.file).string();
}

std::unique_ptr<StoreShard> open_shard(const std::string& folder, const StoreInfo& info,
                                       const StoreInfo::Shard& shard) {
  const std::string path = shard_path(folder, shard);
  if (!std::filesystem::exists(path))
    fail("feature store", "shard {} is missing ({}): copy it there, or extract again", shard.file, folder);
  return std::make_unique<StoreShard>(open_safetensors(path), info, shard, path);
}

class MappedFeatureStore : public FeatureStore {
 public:
  explicit MappedFeatureStore(JoinedParts joined) : joined_(std::move(joined)) {
    info_ = joined_.info;
    int64_t first = 0;
    for (const StorePart& part : joined_.parts) {
      if (!part.info.complete)
        fail("feature store",
             "expected a complete store, got one with {} samples ({}): run the command that began it again",
             part.info.num_samples, part.folder);
      if (part.info.num_samples == 0) fail("feature store", "expected samples, got none ({})", part.folder);
      for (const auto& shard : part.info.shards) {
        shards_.push_back(open_shard(part.folder, part.info, shard));
        first_ids_.push_back(first);
        first += shard.num_samples;
      }
    }
  }

  std::vector<SampleLane> sample_lanes() const override { return joined_.lanes; }
  std::vector<SampleSource> sources() const override { return joined_.sources; }

  void read_mean(std::span<const int64_t> ids, std::span<const uint8_t> flips,
                 std::span<float> out) const override {
    read(ids, flips, out, StoreShard::kMean);
  }
  void read_logvar(std::span<const int64_t> ids, std::span<const uint8_t> flips,
                   std::span<float> out) const override {
    if (!info_.has_logvar) throw std::logic_error("read_logvar: this store has no logvar");
    read(ids, flips, out, StoreShard::kLogvar);
  }
  void prefetch(std::span<const int64_t> ids) const override {
    for (const int64_t id : ids) {
      const Place at = place(id);
      const auto bytes = static_cast<size_t>(at.shard->sample_bytes());
      MappedFile::prefetch({at.shard->latents(StoreShard::kMean, at.index, 0), bytes});
      if (info_.has_logvar)
        MappedFile::prefetch({at.shard->latents(StoreShard::kLogvar, at.index, 0), bytes});
    }
  }
  int64_t label(int64_t id) const override {
    const Place at = place(id);
    return at.shard->label(at.index);
  }
  std::string caption(int64_t id) const override {
    const Place at = place(id);
    return std::string(at.shard->caption(at.index));
  }
  std::string sample_name(int64_t id) const override {
    const Place at = place(id);
    return std::string(at.shard->name(at.index));
  }
  int64_t lane(int64_t id) const override {
    place(id);
    return info_.shards[shard_of(id)].lane;
  }
  std::array<int64_t, 2> image_hw(int64_t id) const override {
    const Place at = place(id);
    return at.shard->image_hw(at.index);
  }

 private:
  struct Place {
    const StoreShard* shard;
    int64_t index;
  };
  Place place(int64_t id) const {
    if (id < 0 || id >= info_.num_samples)
      fail("feature store", "expected a sample from 0 to {}, got {} ({})", info_.num_samples - 1, id,
           joined_.parts.front().folder);
    const size_t shard = shard_of(id);
    return {shards_[shard].get(), id - first_ids_[shard]};
  }
  size_t shard_of(int64_t id) const {
    return std::upper_bound(first_ids_.begin(), first_ids_.end(), id) - first_ids_.begin() - 1;
  }
  // Returns the place of a sample whose `part`, of `elements` elements, is about to be read, and checks that
  // part.
  Place place(int64_t id, int64_t elements, StoreShard::Part part) const {
    const Place at = place(id);
    if (at.shard->latent_elements() != elements)
      throw std::logic_error("feature store: the samples are of other lanes than the output");
    at.shard->check(part, at.index);
    return at;
  }
  static int64_t elements_per_sample(std::span<const int64_t> ids, size_t num_flips, size_t num_elements) {
    if ((num_flips != 0 && num_flips != ids.size()) || (!ids.empty() && num_elements % ids.size() != 0))
      throw std::logic_error("feature store: ids, flips and output differ in size");
    return ids.empty() ? 0 : static_cast<int64_t>(num_elements / ids.size());
  }
  void read(std::span<const int64_t> ids, std::span<const uint8_t> flips, std::span<float> out,
            StoreShard::Part part) const {
    const int64_t size = elements_per_sample(ids, flips.size(), out.size());
    for (size_t i = 0; i < ids.size(); ++i) {
      const int64_t flip = flips.empty() ? 0 : flips[i];
      if (flip >= info_.num_flips)
        throw std::logic_error("feature store: this store has no mirrored samples");
      const Place at = place(ids[i], size, part);
      latents_to_f32(at.shard->dtype(), at.shard->latents(part, at.index, flip), out.subspan(i * size, size));
    }
  }

  const JoinedParts joined_;
  std::vector<std::unique_ptr<StoreShard>> shards_;  // of all parts
  std::vector<int64_t> first_ids_;
};

// Returns a message about the first sample of a shard that holds a NaN or infinity; "" if there is none.
std::string describe_nonfinite(const StoreShard& shard, const StoreInfo& info, const std::string& file) {
  std::vector<float> values(shard.latent_elements());
  for (int64_t i = 0; i < shard.num_samples(); ++i) {
    for (int64_t flip = 0; flip < info.num_flips; ++flip) {
      latents_to_f32(info.dtype, shard.latents(StoreShard::kMean, i, flip), values);
      const bool bad_mean = find_nonfinite(values) >= 0;
      if (info.has_logvar) latents_to_f32(info.dtype, shard.latents(StoreShard::kLogvar, i, flip), values);
      if (bad_mean || find_nonfinite(values) >= 0)
        return fmt::format("{}: the {} of sample {:?} holds NaN or infinity", file,
                           bad_mean ? "mean" : "logvar", shard.name(i));
    }
  }
  return "";
}

std::string find_shard_problem(const std::string& folder, const StoreInfo& info,
                               const StoreInfo::Shard& shard) {
  try {
    const auto opened = open_shard(folder, info, shard);
    const std::string sum = xxh3_hex(MappedFile("feature store", shard_path(folder, shard)).bytes());
    if (sum != shard.xxh3)
      return fmt::format("{}: expected checksum {}, got {}: its bytes have changed since it was written",
                         shard.file, shard.xxh3, sum);
    return describe_nonfinite(*opened, info, shard.file);
  } catch (const Error& error) {
    return fmt::format("{}: {}", shard.file, error.what());
  }
}

}  // namespace

std::shared_ptr<FeatureStore> FeatureStore::open(const std::string& folder, bool verify) {
  if (verify) {
    const auto problems = find_store_problems(folder);
    if (!problems.empty())
      fail("feature store", "{} of {} shards are damaged ({}); first: {}", problems.size(),
           read_store_info(folder).shards.size(), folder, problems.front());
  }
  const StoreInfo info = read_store_info(folder);
  return join({.info = info, .parts = {{folder, info}}, .lanes = info.sample_lanes(), .sources = {}});
}

std::shared_ptr<FeatureStore> FeatureStore::join(JoinedParts parts) {
  return std::make_shared<MappedFeatureStore>(std::move(parts));
}

std::vector<std::string> find_store_problems(const std::string& folder,
                                             const std::function<void(int64_t, int64_t)>& progress) {
  const StoreInfo info = read_store_info(folder);
  std::vector<std::string> problems;
  int64_t done = 0;
  for (const auto& shard : info.shards) {
    std::string problem = find_shard_problem(folder, info, shard);
    if (!problem.empty()) problems.push_back(std::move(problem));
    if (progress) progress(++done, static_cast<int64_t>(info.shards.size()));
  }
  return problems;
}

}  // namespace kiln
