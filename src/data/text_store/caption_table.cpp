#include "data/text_store/caption_table.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/files/xxh3.h"

namespace kiln {

CaptionTable::CaptionTable() { entry_of(""); }

void CaptionTable::add_sample(const std::string& name, std::span<const Caption> captions) {
  sample_names_ += name + '\n';
  double total = 0;
  for (const Caption& caption : captions) {
    if (!(caption.weight >= 0) || !std::isfinite(caption.weight))
      fail("captions", "expected weights of at least 0, got {} ({})", caption.weight, name);
    total += caption.weight;
    entries_.push_back(entry_of(caption.text));
    weights_.push_back(caption.weight);
    kinds_.push_back(kind_of(caption.kind));
  }
  if (captions.empty()) {
    ++num_without_caption_;
    entries_.push_back(0);
    weights_.push_back(1);
    kinds_.push_back(kind_of("none"));
  } else if (total <= 0) {
    fail("captions", "all weights of {} are 0: leave it without captions instead", name);
  }
  offsets_.push_back(static_cast<int64_t>(entries_.size()));
}

int64_t CaptionTable::entry_of(const std::string& text) {
  const auto [found, is_new] = entry_by_text_.try_emplace(text, num_entries());
  if (is_new) texts_.push_back(text);
  return found->second;
}

uint8_t CaptionTable::kind_of(const std::string& name) {
  const auto found = std::find(kind_names_.begin(), kind_names_.end(), name);
  if (found != kind_names_.end()) return static_cast<uint8_t>(found - kind_names_.begin());
  if (kind_names_.size() > UINT8_MAX)
    fail("captions", "expected at most 256 kinds of captions, got {:?} too", name);
  kind_names_.push_back(name);
  return static_cast<uint8_t>(kind_names_.size() - 1);
}

std::string CaptionTable::samples_xxh3() const { return xxh3_hex(std::as_bytes(std::span(sample_names_))); }

std::string xxh3_of_names(int64_t num_samples, const std::function<std::string(int64_t)>& name_of) {
  std::string names;
  for (int64_t sample = 0; sample < num_samples; ++sample) {
    names += name_of(sample);
    names += '\n';
  }
  return xxh3_hex(std::as_bytes(std::span(names)));
}

std::string CaptionTable::fingerprint() const {
  std::string all = sample_names_;
  for (const std::string& text : texts_) all += fmt::format("{}:{}", text.size(), text);
  for (const std::string& kind : kind_names_) all += kind + '\n';
  const auto append = [&](const auto& values) {
    all.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(values[0]));
  };
  append(offsets_);
  append(entries_);
  append(weights_);
  append(kinds_);
  return xxh3_hex(std::as_bytes(std::span(all)));
}

}  // namespace kiln
