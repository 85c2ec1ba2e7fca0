// The text store beside a feature store: STORE/text-NAME/ with text.json, captions.safetensors and
// features-*.safetensors (docs/text_store.md). Memory-mapped, torch-free.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "data/text_store/text_store_info.h"

namespace kiln {

// Read access. Thread-safe; every call but open() is a look-up.
class TextStore {
 public:
  // Throws Error: no such store, unfinished, newer version, a file missing, damaged or of another store.
  // `verify`: every checksum, and NaN or infinity in the features.
  static std::shared_ptr<const TextStore> open(const std::string& folder, bool verify = false);
  virtual ~TextStore() = default;
  const TextStoreInfo& info() const { return info_; }

  // Entry of the caption that a sample has for a draw u in [0, 1): each of its captions as often as its
  // weight says.
  int64_t entry(int64_t sample, double u) const;
  // The empty caption's, for dropped ones and the unconditional half of guidance.
  static constexpr int64_t kNullEntry = 0;
  // All captions of a sample.
  virtual std::span<const int64_t> entries(int64_t sample) const = 0;
  virtual std::span<const float> weights(int64_t sample) const = 0;
  virtual std::span<const uint8_t> kinds(int64_t sample) const = 0;  // indices into info().kinds

  virtual int64_t num_rows(int64_t entry) const = 0;
  // (num_rows, width) of info().dtype.
  virtual std::span<const std::byte> rows(int64_t entry) const = 0;
  virtual std::string_view text(int64_t entry) const = 0;  // as the encoder was given it
  // A hint: these are read soon (starts reading them from disk).
  virtual void prefetch(std::span<const int64_t> entries) const = 0;

 protected:
  TextStoreInfo info_;
};

}  // namespace kiln
