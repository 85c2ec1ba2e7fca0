// Captions of pictures whose features are made while training, when a batch needs them.
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
#include "extract/settings.h"
#include "models/text/caption_encoder.h"

namespace kiln {

// Stands for the text store of the same pictures, encoder and options. Choosing captions and counting their
// rows is thread-safe, as in a store. rows() is for single captions: it encodes a caption at its first call
// and keeps the result. encode() is for batches. Only one thread may encode.
class EncodedText : public TextStore {
 public:
  // `encoder` is on its device. `batch` is the number of captions encoded at once, `compute_dtype` the name
  // of the encoder's type. Throws Error: no caption at all, or one that is no UTF-8.
  EncodedText(std::shared_ptr<const CaptionEncoder> encoder, const ImageDataset& dataset,
              const std::string& data, const CaptionEncodingOptions& options, int64_t batch,
              const std::string& compute_dtype);
  // The same captions by another encoder of the same texts.
  EncodedText(const EncodedText& captions, std::shared_ptr<const CaptionEncoder> encoder, int64_t batch,
              const std::string& compute_dtype);

  std::span<const int64_t> entries(int64_t sample) const override;
  std::span<const float> weights(int64_t sample) const override;
  std::span<const uint8_t> kinds(int64_t sample) const override;
  int64_t num_rows(int64_t entry) const override { return static_cast<int64_t>(tokens(entry).size()); }
  std::span<const std::byte> rows(int64_t entry) const override;
  std::string_view text(int64_t entry) const override { return table_->text(entry); }
  void prefetch(std::span<const int64_t>) const override {}

  // Returns the ids that the encoder gets for a caption, one per row.
  text::TokenIds tokens(int64_t entry) const;
  // Writes the rows (T, D) of captions to `to`, in info().dtype. The ids of caption i are [offsets[i],
  // offsets[i + 1]) of `ids`. Equal captions are encoded once, the empty one is kept from its first time, and
  // those that are `dropped` are not encoded: their rows are 0. Throws Error for features that are not
  // finite.
  void encode(std::span<const int64_t> ids, std::span<const int32_t> offsets,
              std::span<const uint8_t> dropped, std::span<std::byte> to) const;
  // Encodes as many captions of the greatest length as a batch has at once, so that no later batch is the
  // first to take that memory. `captions` is the number in a batch.
  void rehearse(int64_t captions) const;

  const std::shared_ptr<const CaptionEncoder>& encoder() const { return encoder_; }
  const CaptionEncodingOptions& options() const { return options_; }
  int64_t batch() const { return batch_; }

 private:
  EncodedText(std::shared_ptr<const CaptionEncoder> encoder, std::shared_ptr<const CaptionTable> table,
              const CaptionEncodingOptions& options, int64_t batch, const std::string& compute_dtype);
  template <class T>
  std::span<const T> part(const std::vector<T>& column, int64_t sample) const;
  std::vector<at::Tensor> encode_tokens(std::span<const text::TokenIds> ids) const;

  std::shared_ptr<const CaptionEncoder> encoder_;
  CaptionEncodingOptions options_;
  int64_t batch_;
  std::shared_ptr<const CaptionTable> table_;
  text::TokenIds null_tokens_;
  mutable std::mutex mutex_;
  mutable std::map<int64_t, at::Tensor> kept_;  // rows of single captions
};

// Returns the fingerprint that the captions of a data set have in a store. Throws Error as above.
std::string captions_fingerprint(const ImageDataset& dataset, const std::string& data,
                                 const CaptionOptions& options);

// The shape of captions, estimated from some of them.
struct SampledText {
  TextShape shape;
  double cut_share = 0;  // share of captions that are longer than the encoder takes
};
SampledText sampled_shape(const EncodedText& text);

}  // namespace kiln
