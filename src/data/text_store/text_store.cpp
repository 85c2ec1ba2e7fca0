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

void check_xxh3(const std::string& path, const std::string& found, const std::string& expected) {
  if (found != expected)
    fail("text store",
         "{} is not the file that text.json names: its checksum is another, so it was exchanged or has "
         "changed: put the right one back, or extract the text again",
         path);
}

void check_file(const std::string& path, const std::string& expected) {
  check_xxh3(path, xxh3_hex(MappedFile("text store", path).bytes()), expected);
}

// Opens a shard and compares its small columns, the checksums of captions among them, with text.json.
std::unique_ptr<FeaturesFile> open_shard(const std::string& folder, const TextStoreInfo& info,
                                         int64_t shard) {
  auto file = std::make_unique<FeaturesFile>(folder, info, shard);
  if (!info.columns_xxh3.empty())
    check_xxh3(features_path(folder, shard), file->columns_xxh3(), info.columns_xxh3[shard]);
  return file;
}

class MappedTextStore : public TextStore {
 public:
  MappedTextStore(const std::string& folder, TextStoreInfo info) : folder_(folder), captions_(folder, info) {
    info_ = std::move(info);
    for (int64_t shard = 0; shard < info_.num_shards(); ++shard)
      shards_.push_back(open_shard(folder, info_, shard));
  }

  std::span<const int64_t> entries(int64_t sample) const override { return part(captions_.entries, sample); }
  std::span<const float> weights(int64_t sample) const override { return part(captions_.weights, sample); }
  std::span<const uint8_t> kinds(int64_t sample) const override { return part(captions_.kinds, sample); }

  int64_t num_rows(int64_t entry) const override {
    return shard_of(entry).num_rows(entry % info_.entries_per_shard);
  }
  std::span<const std::byte> rows(int64_t entry) const override {
    const FeaturesFile& shard = shard_of(entry);
    const int64_t index = entry % info_.entries_per_shard;
    shard.check(index, [&] {
      fail(
          "text store",
          "caption {:?} is damaged: its features have changed since they were written ({}): extract the text "
          "again, or copy the file from where it is whole",
          captions_.text(entry), features_path(folder_, entry / info_.entries_per_shard));
    });
    return shard.rows(index);
  }
  std::string_view text(int64_t entry) const override {
    check_index("caption", entry, info_.num_entries);
    return captions_.text(entry);
  }

  void prefetch(std::span<const int64_t> entries) const override {
    static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    for (const int64_t entry : entries) {
      // Not rows(), which would wait for them.
      const std::span<const std::byte> bytes = shard_of(entry).rows(entry % info_.entries_per_shard);
      const auto begin = reinterpret_cast<uintptr_t>(bytes.data()) / page * page;
      const auto end = reinterpret_cast<uintptr_t>(bytes.data()) + bytes.size();
      if (end > begin) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_WILLNEED);
    }
  }

 private:
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

  std::string folder_;
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
  if (verify)
    if (const auto problems = find_text_store_problems(folder); !problems.empty()) throw Error(problems[0]);
  check_file(captions_path(folder), info.captions_xxh3);
  return std::make_shared<MappedTextStore>(folder, std::move(info));
}

std::vector<std::string> find_text_store_problems(const std::string& folder) {
  std::vector<std::string> problems;
  const auto note_problem_of = [&](const auto& check) {
    try {
      check();
    } catch (const Error& error) {
      problems.emplace_back(error.what());
    }
  };
  TextStoreInfo info;
  note_problem_of([&] {
    info = read_text_store_info(folder);
    if (!info.complete) fail("text store", "{} is unfinished: run its kiln extract again", folder);
  });
  if (!problems.empty()) return problems;
  note_problem_of([&] {
    check_file(captions_path(folder), info.captions_xxh3);
    const CaptionsFile captions(folder, info);
  });
  for (int64_t shard = 0; shard < info.num_shards(); ++shard)
    note_problem_of([&] {
      check_file(features_path(folder, shard), info.shards_xxh3[shard]);
      const auto file = open_shard(folder, info, shard);
      if (!has_only_finite(file->features(), info.dtype))
        fail("text store", "{} holds NaN or infinity", features_path(folder, shard));
    });
  return problems;
}

}  // namespace kiln
