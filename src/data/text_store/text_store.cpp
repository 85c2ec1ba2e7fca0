#include "data/text_store/text_store.h"

#include <algorithm>
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
    for (const int64_t entry : entries)  // not rows(), which would wait for them
      MappedFile::prefetch(shard_of(entry).rows(entry % info_.entries_per_shard));
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

class JoinedText : public TextStore {
 public:
  explicit JoinedText(const std::vector<std::string>& folders) {
    for (const std::string& folder : folders) add(folder, folders.front());
    for (int64_t sample = 0; sample < info_.num_samples; ++sample) {
      const Place at = place(first_samples_, sample);
      for (const int64_t entry : stores_[at.store]->entries(at.index))
        entries_.push_back(joined_entry(at.store, entry));
      offsets_.push_back(entries_.size());
    }
  }

  std::span<const int64_t> entries(int64_t sample) const override {
    place(first_samples_, sample);
    const auto i = static_cast<size_t>(sample);
    return std::span(entries_).subspan(offsets_[i], offsets_[i + 1] - offsets_[i]);
  }
  std::span<const float> weights(int64_t sample) const override {
    return of_store(first_samples_, sample, &TextStore::weights);
  }
  std::span<const uint8_t> kinds(int64_t sample) const override {
    return of_store(first_samples_, sample, &TextStore::kinds);
  }
  int64_t num_rows(int64_t entry) const override {
    return of_store(first_entries_, entry, &TextStore::num_rows);
  }
  std::span<const std::byte> rows(int64_t entry) const override {
    return of_store(first_entries_, entry, &TextStore::rows);
  }
  std::string_view text(int64_t entry) const override {
    return of_store(first_entries_, entry, &TextStore::text);
  }
  void prefetch(std::span<const int64_t> entries) const override {
    for (const int64_t entry : entries) {
      const Place at = place(first_entries_, entry);
      stores_[at.store]->prefetch({&at.index, 1});
    }
  }

 private:
  struct Place {
    size_t store;
    int64_t index;
  };
  static Place place(const std::vector<int64_t>& firsts, int64_t index) {
    if (index < 0 || index >= firsts.back())
      fail("text store", "expected 0 to {}, got {}", firsts.back() - 1, index);
    const auto after = std::ranges::upper_bound(firsts, index);
    const auto store = static_cast<size_t>(after - firsts.begin() - 1);
    return {store, index - firsts[store]};
  }
  template <class Result>
  Result of_store(const std::vector<int64_t>& firsts, int64_t index,
                  Result (TextStore::*what)(int64_t) const) const {
    const Place at = place(firsts, index);
    return (*stores_[at.store].*what)(at.index);
  }
  // The empty caption is the same in all stores and has one entry.
  int64_t joined_entry(size_t store, int64_t entry) const {
    return entry == kNullEntry ? kNullEntry : first_entries_[store] + entry;
  }

  void add(const std::string& folder, const std::string& first) {
    stores_.push_back(TextStore::open(folder));
    const TextStoreInfo& info = stores_.back()->info();
    if (stores_.size() == 1) {
      info_ = info;
    } else {
      require_same_encoder(info_, first, info, folder);
      info_.num_samples += info.num_samples;
      info_.num_entries += info.num_entries;
      if (info.columns_xxh3.empty()) info_.columns_xxh3.clear();  // not all can be checked
    }
    first_samples_.push_back(info_.num_samples);
    first_entries_.push_back(info_.num_entries);
  }

  std::vector<std::shared_ptr<const TextStore>> stores_;
  // The first sample and entry of each store; the last number counts all.
  std::vector<int64_t> first_samples_{0}, first_entries_{0};
  std::vector<int64_t> entries_;
  std::vector<size_t> offsets_{0};  // where each sample begins in entries_
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

std::shared_ptr<const TextStore> open_texts(const std::vector<std::string>& folders) {
  if (folders.size() == 1) return TextStore::open(folders.front());
  return std::make_shared<JoinedText>(folders);
}

void require_same_encoder(const TextStoreInfo& first, const std::string& first_folder,
                          const TextStoreInfo& other, const std::string& other_folder) {
  const auto described = [](const TextStoreInfo& info) {
    return fmt::format("{} {} with tokenizer {}{}, up to {} tokens in {}", info.encoder,
                       info.encoder_fingerprint, info.tokenizer_fingerprint,
                       info.instruction.empty() ? "" : fmt::format(" after {:?}", info.instruction),
                       info.max_tokens, dtype_name(info.dtype));
  };
  if (described(first) == described(other) && first.width == other.width && first.padded == other.padded)
    return;
  fail("text store",
       "the captions in {} are by another encoder ({}) than those in {} ({}): extract them again with the "
       "settings of {}",
       other_folder, described(other), first_folder, described(first), first_folder);
}

}  // namespace kiln
