// The text store beside a feature store: STORE/text-NAME/ with text.json, captions.safetensors and
// features-*.safetensors (docs/text_store.md). Memory-mapped, torch-free.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/text_store/text_store_info.h"

namespace kiln {

// Read access to a text store. Thread-safe. Every call but open() is a look-up.
class TextStore {
 public:
  // Throws Error: no such store, unfinished, newer version, a file missing, or one whose columns are damaged
  // or of another store. `verify` also checks every other byte, and the features for NaN and infinity.
  static std::shared_ptr<const TextStore> open(const std::string& folder, bool verify = false);
  virtual ~TextStore() = default;
  const TextStoreInfo& info() const { return info_; }

  // Returns the entry of the caption that a draw u in [0, 1) chooses for a sample, each caption in proportion
  // to its weight.
  int64_t entry(int64_t sample, double u) const;
  // The entry of the empty caption, for dropped captions and the unconditional half of guidance.
  static constexpr int64_t kNullEntry = 0;
  // All captions of a sample.
  virtual std::span<const int64_t> entries(int64_t sample) const = 0;
  virtual std::span<const float> weights(int64_t sample) const = 0;
  virtual std::span<const uint8_t> kinds(int64_t sample) const = 0;  // indices into info().kinds

  virtual int64_t num_rows(int64_t entry) const = 0;
  // The features (num_rows, width) in info().dtype. The first read of a caption in a store checks its bytes
  // and throws Error naming a caption whose checksum has changed since it was written.
  virtual std::span<const std::byte> rows(int64_t entry) const = 0;
  virtual std::string_view text(int64_t entry) const = 0;  // as the encoder got it
  // Starts reading entries from disk that are needed soon.
  virtual void prefetch(std::span<const int64_t> entries) const = 0;

 protected:
  TextStoreInfo info_;
};

// Returns what is wrong with the files of a text store, one line each; empty if all is well.
std::vector<std::string> find_text_store_problems(const std::string& folder);

// Opens text stores as one. Their samples follow each other store by store, in the order of `folders`. A
// single store is opened as it is. info() of the joined store is that of the first one, with the samples and
// entries of all. Throws Error naming the folder that does not fit the first one: another encoder, tokenizer,
// length or precision.
std::shared_ptr<const TextStore> open_texts(const std::vector<std::string>& folders);

// Throws Error unless the captions of both stores can be trained on together.
void require_same_encoder(const TextStoreInfo& first, const std::string& first_folder,
                          const TextStoreInfo& other, const std::string& other_folder);

}  // namespace kiln
