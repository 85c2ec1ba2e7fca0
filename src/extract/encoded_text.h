// Captions of pictures whose features are made while training, when a batch asks for them.
#pragma once
#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "data/images/image_dataset.h"
#include "data/store/data_shape.h"
#include "data/text_store/text_store.h"
#include "extract/text_settings.h"
#include "models/text/caption_encoder.h"

namespace kiln {

// What the text store of the same pictures, encoder and options would say. Choosing captions and counting
// their rows is thread-safe, as a store's is. rows() is for single captions: it encodes one when it is first
// asked for and keeps it. Batches are encoded by encode(). One thread encodes.
class EncodedText : public TextStore {
 public:
  // `encoder`: on its device. `batch`: captions encoded at once. `compute_dtype`: the encoder's, by name.
  // Throws Error: no caption at all, or one that is no UTF-8.
  EncodedText(std::shared_ptr<const CaptionEncoder> encoder, const ImageDataset& dataset,
              const std::string& data, const TextExtractOptions& options, int64_t batch,
              const std::string& compute_dtype);

  std::span<const int64_t> entries(int64_t sample) const override;
  std::span<const float> weights(int64_t sample) const override;
  std::span<const uint8_t> kinds(int64_t sample) const override;
  int64_t num_rows(int64_t entry) const override { return static_cast<int64_t>(tokens(entry).size()); }
  std::span<const std::byte> rows(int64_t entry) const override;
  std::string_view text(int64_t entry) const override { return table_.text(entry); }
  void prefetch(std::span<const int64_t>) const override {}

  // What the encoder is given of a caption: one id a row.
  text::TokenIds tokens(int64_t entry) const;
  // The rows (T, D) of captions whose ids follow each other: those of caption i are
  // [offsets[i], offsets[i + 1]). Equal ones are encoded once, the empty one not again, and those that are
  // `dropped` not at all: their rows are 0. `to` has room for them, in info().dtype. Throws Error for
  // features that are not finite.
  void encode(std::span<const int64_t> ids, std::span<const int32_t> offsets,
              std::span<const uint8_t> dropped, std::span<std::byte> to) const;
  // Encodes as many captions of the greatest length as a batch has at once, so that no later batch is the
  // first to ask for that memory. `captions`: of a batch.
  void rehearse(int64_t captions) const;

  const std::shared_ptr<const CaptionEncoder>& encoder() const { return encoder_; }
  const TextExtractOptions& options() const { return options_; }
  int64_t batch() const { return batch_; }

 private:
  template <class T>
  std::span<const T> part(const std::vector<T>& column, int64_t sample) const;
  std::vector<at::Tensor> encode_tokens(std::span<const text::TokenIds> ids) const;

  std::shared_ptr<const CaptionEncoder> encoder_;
  TextExtractOptions options_;
  int64_t batch_;
  CaptionTable table_;
  text::TokenIds null_tokens_;
  mutable std::mutex mutex_;
  mutable std::map<int64_t, at::Tensor> kept_;  // rows of single captions
};

// What captions look like, as far as a sample of them tells.
struct SampledText {
  TextShape shape;
  double cut_share = 0;  // of those that are longer than the encoder takes
};
SampledText sampled_shape(const EncodedText& text);

}  // namespace kiln
