// The captions of a data set as a text store keeps them: equal texts only once. Torch-free.
#pragma once
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "data/images/image_dataset.h"

namespace kiln {

// Entries are distinct texts; entry 0 is the empty one, which stands for "no caption".
class CaptionTable {
 public:
  CaptionTable();
  // Adds the captions of the next sample. Without any it gets the empty one. Throws Error: a negative weight,
  // or all weights are 0.
  void add_sample(const std::string& name, std::span<const Caption> captions);

  int64_t num_entries() const { return static_cast<int64_t>(texts_.size()); }
  int64_t num_samples() const { return static_cast<int64_t>(offsets_.size()) - 1; }
  const std::string& text(int64_t entry) const { return texts_[entry]; }
  int64_t num_without_caption() const { return num_without_caption_; }
  // The captions of sample i are elements [offsets()[i], offsets()[i + 1]) of entries(), weights() and
  // kinds().
  const std::vector<int64_t>& offsets() const { return offsets_; }
  const std::vector<int64_t>& entries() const { return entries_; }
  const std::vector<float>& weights() const { return weights_; }
  const std::vector<uint8_t>& kinds() const { return kinds_; }  // indices into kind_names()
  const std::vector<std::string>& kind_names() const { return kind_names_; }
  std::string samples_xxh3() const;  // of the samples' names, as xxh3_of_names() has it
  // Hashes all of the above and the samples' names.
  std::string fingerprint() const;

 private:
  int64_t entry_of(const std::string& text);
  uint8_t kind_of(const std::string& name);

  std::vector<std::string> texts_;
  std::unordered_map<std::string, int64_t> entry_by_text_;
  std::vector<int64_t> offsets_{0}, entries_;
  std::vector<float> weights_;
  std::vector<uint8_t> kinds_;
  std::vector<std::string> kind_names_;
  std::string sample_names_;
  int64_t num_without_caption_ = 0;
};

// Returns the XXH3 of the names of a store's samples, each followed by a line break.
std::string xxh3_of_names(int64_t num_samples, const std::function<std::string(int64_t)>& name_of);

}  // namespace kiln
