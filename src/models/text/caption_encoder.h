// Turns texts into features with the tokenizer and the text encoder of one folder. For use by one thread.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "models/conditioning.h"
#include "models/text/streamed_weights.h"
#include "models/text/text_registry.h"
#include "text/tokenizers/tokenizer.h"

namespace kiln {

// The memory that an encoder may take.
struct EncoderRoom {
  int64_t bytes = 0;   // of the device, for weights and work; 0: no limit
  std::string text{};  // the limit's name in messages: "--text-encoder-memory 3G"
};

enum class EncoderUse {
  kOutline,  // makes ids alone, without its weights: it has no fingerprint
  kCheck,    // whether its files are there and fit each other: it has no fingerprint
  kIds,      // makes ids only
  kEncode,   // loads weights and encodes
};

class CaptionEncoder {
 public:
  // `folder` holds an encoder with its tokenizer, or a pipeline with both. Longer texts are cut to
  // `max_tokens`; 0: the encoder's usual number. If the weights do not fit `room`, they are streamed
  // (streamed_weights.h). The encoder sees `instruction` before every text but the empty one, as in Sana: of
  // its rows only the first and the last are kept, and max_tokens counts what is kept. Throws Error if a file
  // is missing or tokenizer and encoder do not belong together, or for an instruction to an encoder whose
  // texts do not begin with one token of their own and end without one, as Gemma's do.
  CaptionEncoder(const std::string& folder, int64_t max_tokens, at::Device device,
                 at::ScalarType compute_dtype, EncoderRoom room = {}, EncoderUse use = EncoderUse::kEncode,
                 std::string instruction = {});

  const TextEncoderShape& shape() const { return opened_.encoder->shape(); }
  int64_t max_tokens() const { return max_tokens_; }
  // Tokens of the instruction whose rows are not kept.
  int64_t num_hidden_tokens() const { return std::max<int64_t>(std::ssize(instruction_) - 2, 0); }
  void limit_tokens(int64_t most) { max_tokens_ = std::min(max_tokens_, most); }
  const std::string& encoder_fingerprint() const { return opened_.fingerprint; }
  std::string tokenizer_fingerprint() const { return tokenizer_->fingerprint(); }
  bool is_streamed() const { return streamed_ != nullptr; }
  // The least seconds of a pass over streamed weights.
  double seconds_of_pass() const { return opened_.read_seconds; }

  // Returns how many texts to encode at once: `asked`, or for 0 `usual`, halved until it fits. Throws Error
  // when `asked` or a single text does not fit.
  int64_t batch_within_room(int64_t asked, int64_t usual) const;
  // Describes in one line what streaming costs with this batch.
  std::string streaming_text(int64_t batch) const;

  struct Encoded {
    // One tensor (rows, D) for each text, on the CPU. Rows are tokens; with shape().users_see_padding there
    // are always max_tokens.
    std::vector<at::Tensor> rows;
    int64_t num_truncated = 0;  // texts that were longer than max_tokens
  };
  // Encodes `batch` texts at once, those of similar length together, into rows of `dtype`. The last bits of a
  // text's features may depend on the other texts of its batch, but not on streaming. If the encoder's tokens
  // see no later ones (Gemma 2), the prefix that saves the most work, such as an instruction, is computed
  // once and kept for the next call with the same. Records no gradients.
  // The rows of `plain`, if given, are the last: a text that the encoder sees without the instruction, such
  // as a negative prompt.
  Encoded encode(std::span<const std::string> texts, int64_t batch, at::ScalarType dtype = at::kFloat,
                 const std::optional<std::string>& plain = std::nullopt) const;

  // Returns the ids that encode() makes of a text, one for each row that it keeps: encode_tokens() adds the
  // others of the instruction. Adds 1 to `num_truncated` if the text is cut. Thread-safe. Throws Error for a
  // text that changes the instruction's own tokens.
  text::TokenIds tokens_of(const std::string& text, int64_t& num_truncated) const;
  // Returns the rows of texts with these ids, as encode() does.
  std::vector<at::Tensor> encode_tokens(std::span<const text::TokenIds> ids, int64_t batch,
                                        at::ScalarType dtype = at::kFloat) const;

  std::vector<at::Tensor> weights() const;  // those in memory; none if they are streamed

 private:
  int64_t longest_input() const { return max_tokens_ + num_hidden_tokens(); }
  void tokenize_instruction();
  text::TokenIds plain_tokens(const std::string& text, int64_t& num_truncated) const;
  std::vector<at::Tensor> encode_captions(std::vector<text::TokenIds> ids, size_t num_instructed,
                                          int64_t batch, at::ScalarType dtype) const;
  std::vector<at::Tensor> encode_inputs(std::span<const text::TokenIds> ids, int64_t batch,
                                        at::ScalarType dtype) const;
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
  std::string instruction_text_;
  text::TokenIds instruction_;                 // the ids of instruction_text_; empty: there is none
  std::unique_ptr<StreamedWeights> streamed_;  // null: all weights are in memory
  mutable TokenPrefix prefix_;                 // of the last call that had one; no ids: none yet
};

// Joins the rows of several texts, in `dtype`.
TextRows joined_rows(const std::vector<at::Tensor>& rows, at::ScalarType dtype);

// Finds the tokens that texts begin with in common, such as an instruction.
inline constexpr int64_t kLeastShared = 16;  // a shorter prefix is not worth its own pass
// Returns the prefix that saves the most tokens when it is computed once. With n texts that continue it, a
// prefix saves n - 1 times its length. Returns an empty one when no two texts share kLeastShared tokens.
std::vector<int64_t> best_shared_prefix(std::span<const std::vector<int64_t>> texts);

// True if the text begins with the prefix and has a token after it. False for an empty prefix.
bool goes_on_after(std::span<const int64_t> text, std::span<const int64_t> prefix);

}  // namespace kiln
