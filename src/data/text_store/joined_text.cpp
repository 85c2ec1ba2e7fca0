#include "data/text_store/joined_text.h"

#include <algorithm>

#include "core/error.h"

namespace kiln {

namespace {

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
    const Place at = place(first_samples_, sample);
    return stores_[at.store]->weights(at.index);
  }
  std::span<const uint8_t> kinds(int64_t sample) const override {
    const Place at = place(first_samples_, sample);
    return stores_[at.store]->kinds(at.index);
  }
  int64_t num_rows(int64_t entry) const override {
    const Place at = place(first_entries_, entry);
    return stores_[at.store]->num_rows(at.index);
  }
  std::span<const std::byte> rows(int64_t entry) const override {
    const Place at = place(first_entries_, entry);
    return stores_[at.store]->rows(at.index);
  }
  std::string_view text(int64_t entry) const override {
    const Place at = place(first_entries_, entry);
    return stores_[at.store]->text(at.index);
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
