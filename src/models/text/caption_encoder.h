// Texts to features: a tokenizer and a text encoder, as they lie in one folder. For one thread.
#pragma once
#include <algorithm>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "models/conditioning.h"
#include "models/text/streamed_weights.h"
#include "models/text/text_registry.h"
#include "text/tokenizers/tokenizer.h"

namespace kiln {

// How much memory an encoder may take.
struct EncoderRoom {
  int64_t bytes = 0;   // of the device, for weights and work; 0: all they want
  std::string text{};  // what it is, for messages: "--text-encoder-memory 3G"
};

class CaptionEncoder {
 public:
  // `folder`: of an encoder with its tokenizer, or of a pipeline with both. `max_tokens`: longer texts are
  // cut; 0: what the encoder is used with. Weights for which there is no room are streamed
  // (streamed_weights.h). Without `loads_weights` it makes ids alone; on meta so too, and it has no
  // fingerprint. Throws Error: a file is missing, or the two do not belong together.
  CaptionEncoder(const std::string& folder, int64_t max_tokens, at::Device device,
                 at::ScalarType compute_dtype, EncoderRoom room = {}, bool loads_weights = true);

  const TextEncoderShape& shape() const { return opened_.encoder->shape(); }
  int64_t max_tokens() const { return max_tokens_; }
  void limit_tokens(int64_t most) { max_tokens_ = std::min(max_tokens_, most); }
  const std::string& encoder_fingerprint() const { return opened_.fingerprint; }
  std::string tokenizer_fingerprint() const { return tokenizer_->fingerprint(); }
  bool is_streamed() const { return streamed_ != nullptr; }
  double seconds_of_pass() const { return opened_.read_seconds; }  // over streamed weights, at least

  // Texts to encode at once: `asked`, or for 0 `usual` or what of it there is room for. Throws Error when
  // there is none for `asked` or for a single one.
  int64_t batch_within_room(int64_t asked, int64_t usual) const;
  // What streaming costs with this batch, one line.
  std::string streaming_text(int64_t batch) const;

  struct Encoded {
    std::vector<at::Tensor> rows;  // of each text (rows, D) on the CPU, one row a token; with
                                   // shape().users_see_padding always max_tokens
    int64_t num_truncated = 0;     // texts that were longer than max_tokens
  };
  // `batch` texts at once, those of similar length together: a text's features may differ in their last bits
  // with what it is encoded beside. Whether weights are streamed does not change them. `dtype`: of the rows.
  // Where the encoder's tokens see none that come later (Gemma 2), the prefix that most texts share, such as
  // an instruction, is computed once and kept for the next call with the same. In inference mode.
  Encoded encode(std::span<const std::string> texts, int64_t batch, at::ScalarType dtype = at::kFloat) const;

  // The ids that encode() makes of a text; counts it where it is cut. Thread-safe.
  text::TokenIds tokens_of(const std::string& text, int64_t& num_truncated) const;
  // The rows of texts whose ids these are, as encode() gives them.
  std::vector<at::Tensor> encode_tokens(std::span<const text::TokenIds> ids, int64_t batch,
                                        at::ScalarType dtype = at::kFloat) const;

  std::vector<at::Tensor> weights() const;  // that are in memory; none where they are streamed

 private:
  void choose_prefix(std::span<const text::TokenIds> ids) const;
  void encode_batches(std::span<const TextBatch> batches,
                      const std::function<void(size_t, at::Tensor)>& take) const;
  void encode_streamed(std::span<const TextBatch> batches,
                       const std::function<void(size_t, at::Tensor)>& take) const;
  int64_t needed_bytes(int64_t batch) const;
  int64_t renumbered_bytes(int64_t num_tokens) const;

  std::unique_ptr<text::Tokenizer> tokenizer_;
  OpenedTextEncoder opened_;
  int64_t max_tokens_ = 0;
  at::Device device_;
  EncoderRoom room_;
  std::unique_ptr<StreamedWeights> streamed_;  // null: all weights are in memory
  mutable TokenPrefix prefix_;                 // of the latest call with one; without ids: none yet
};

// The rows of several texts as one, in `dtype`.
TextRows joined_rows(const std::vector<at::Tensor>& rows, at::ScalarType dtype);

}  // namespace kiln
