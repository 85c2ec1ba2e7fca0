#include "data/text_store/text_store.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "core/error.h"
#include "core/files/mapped_file.h"
#include "core/files/xxh3.h"
#include "data/text_store/text_files.h"

namespace kiln {
namespace {

// True if no value is NaN or infinite. Those are the numbers with all bits of the exponent set.
bool has_only_finite(std::span<const std::byte> features, Dtype dtype) {
  if (dtype == Dtype::kF32) {
    for (size_t i = 0; i < features.size(); i += sizeof(float)) {
      float value;
      std::memcpy(&value, features.data() + i, sizeof value);
      if (!std::isfinite(value)) return false;
    }
    return true;
  }
  const uint16_t exponent = dtype == Dtype::kF16 ? 0x7C00 : 0x7F80;
  for (size_t i = 0; i < features.size(); i += sizeof(uint16_t)) {
    uint16_t bits;
    std::memcpy(&bits, features.data() + i, sizeof bits);
    if ((bits & exponent) == exponent) return false;
  }
  return true;
}

class MappedTextStore : public TextStore {
 public:
  MappedTextStore(const std::string& folder, TextStoreInfo info, bool verify) : captions_(folder, info) {
    info_ = std::move(info);
    if (verify) check_file(captions_path(folder), info_.captions_xxh3);
    for (int64_t shard = 0; shard < info_.num_shards(); ++shard) {
      if (verify) check_file(features_path(folder, shard), info_.shards_xxh3[shard]);
      shards_.push_back(std::make_unique<FeaturesFile>(folder, info_, shard));
      if (verify && !has_only_finite(shards_.back()->features(), info_.dtype))
        fail("text store", "{} holds NaN or infinity", features_path(folder, shard));
    }
  }

  std::span<const int64_t> entries(int64_t sample) const override { return part(captions_.entries, sample); }
  std::span<const float> weights(int64_t sample) const override { return part(captions_.weights, sample); }
  std::span<const uint8_t> kinds(int64_t sample) const override { return part(captions_.kinds, sample); }

  int64_t num_rows(int64_t entry) const override {
    return shard_of(entry).num_rows(entry % info_.entries_per_shard);
  }
  std::span<const std::byte> rows(int64_t entry) const override {
    return shard_of(entry).rows(entry % info_.entries_per_shard);
  }
  std::string_view text(int64_t entry) const override {
    check_index("caption", entry, info_.num_entries);
    return captions_.text(entry);
  }

  void prefetch(std::span<const int64_t> entries) const override {
    static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    for (const int64_t entry : entries) {
      const std::span<const std::byte> bytes = rows(entry);
      const auto begin = reinterpret_cast<uintptr_t>(bytes.data()) / page * page;
      const auto end = reinterpret_cast<uintptr_t>(bytes.data()) + bytes.size();
      if (end > begin) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_WILLNEED);
    }
  }

 private:
  static void check_file(const std::string& path, const std::string& expected) {
    const MappedFile file("text store", path);
    if (xxh3_hex(file.bytes()) != expected)
      fail("text store", "{} is damaged: its checksum does not match", path);
  }

  static void check_index(const char* what, int64_t index, int64_t size) {
    if (index < 0 || index >= size) fail("text store", "expected {} 0 to {}, got {}", what, size - 1, index);
  }

  template <class T>
  std::span<const T> part(std::span<const T> column, int64_t sample) const {
    check_index("sample", sample, info_.num_samples);
    const CaptionsFile::Range range = captions_.captions(sample);
    return column.subspan(range.first, range.count);
  }

  const FeaturesFile& shard_of(int64_t entry) const {
    check_index("caption", entry, info_.num_entries);
    return *shards_[entry / info_.entries_per_shard];
  }

  CaptionsFile captions_;
  std::vector<std::unique_ptr<FeaturesFile>> shards_;
};

}  // namespace

int64_t TextStore::entry(int64_t sample, double u) const {
  const std::span<const int64_t> choices = entries(sample);
  const std::span<const float> shares = weights(sample);
  double left = u * std::accumulate(shares.begin(), shares.end(), 0.0);
  size_t last = 0;  // the last with a weight above 0: the choice if rounding carries u past the end
  for (size_t i = 0; i < choices.size(); ++i) {
    if (shares[i] <= 0) continue;
    if (left < shares[i]) return choices[i];
    left -= shares[i];
    last = i;
  }
  return choices[last];
}

std::shared_ptr<const TextStore> TextStore::open(const std::string& folder, bool verify) {
  TextStoreInfo info = read_text_store_info(folder);
  if (!info.complete) fail("text store", "{} is unfinished: run its kiln extract again", folder);
  return std::make_shared<MappedTextStore>(folder, std::move(info), verify);
}

}  // namespace kiln
