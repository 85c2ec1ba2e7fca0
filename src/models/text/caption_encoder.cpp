#include "models/text/caption_encoder.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <optional>
#include <utility>

#include "core/aten.h"
#include "core/error.h"
#include "core/json_config.h"
#include "core/memory_limits.h"
#include "core/text/json_text.h"
#include "core/units.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kManyTokens = 300;  // for encoders without a limit: PixArt-Sigma's and Sana's length
constexpr int64_t kMostTokens = 1 << 16;
constexpr double kMargin = 1.05;                      // over a dry run, for scratch of products
constexpr int64_t kProcessBytes = int64_t{96} << 20;  // threads and code of the first products on a CPU

// Returns the length at which sentence-transformers cuts, if its file says one.
std::optional<int64_t> sentence_length(const fs::path& folder) {
  const fs::path path = folder / "sentence_bert_config.json";
  if (!fs::exists(path)) return std::nullopt;
  const nlohmann::json config = read_json_file("text", path.string());
  if (!config.is_object()) fail("text", "{} is no JSON object", path.string());
  return JsonConfig("text", config).positive("max_seq_length", kManyTokens);
}

int64_t max_tokens_of(const std::string& folder, int64_t asked, const TextEncoderShape& shape,
                      const text::Tokenizer& tokenizer) {
  const int64_t possible = shape.max_tokens > 0 ? shape.max_tokens : kMostTokens;
  if (asked != 0) {
    if (asked < 1 || asked > possible)
      fail("text", "--text-max-tokens: expected 1 to {} for {}, got {}", possible, shape.family, asked);
    return asked;
  }
  const int64_t usual = shape.max_tokens > 0 ? shape.max_tokens : kManyTokens;
  return std::min({usual, sentence_length(folder).value_or(usual), tokenizer.max_length().value_or(usual)});
}

}  // namespace

CaptionEncoder::CaptionEncoder(const std::string& folder, int64_t max_tokens, at::Device device,
                               at::ScalarType compute_dtype, EncoderRoom room, EncoderUse use,
                               std::string instruction)
    : tokenizer_(text::load_tokenizer(folder)),
      opened_(use == EncoderUse::kOutline
                  ? OpenedTextEncoder{.encoder = outline_text_encoder(folder, compute_dtype)}
                  : open_text_encoder(folder, compute_dtype, use != EncoderUse::kCheck)),
      device_(device),
      room_(std::move(room)),
      instruction_text_(std::move(instruction)) {
  if (tokenizer_->vocabulary_size() > shape().vocabulary_size)
    fail("text", "the tokenizer of {} has {} tokens, its encoder {}: they do not belong together", folder,
         tokenizer_->vocabulary_size(), shape().vocabulary_size);
  max_tokens_ = max_tokens_of(folder, max_tokens, shape(), *tokenizer_);
  tokenize_instruction();
  if (use != EncoderUse::kEncode) return;
  if (room_.bytes == 0 || weight_bytes(*opened_.encoder) + needed_bytes(1) <= room_.bytes) {
    opened_.load(device);
    return;
  }
  streamed_ = std::make_unique<StreamedWeights>(*opened_.encoder, opened_.stored, device);
  if (device.is_cpu()) return_freed_memory();
}

// Returns the most bytes of the token table's rows that a batch needs, in f32.
int64_t CaptionEncoder::renumbered_bytes(int64_t num_tokens) const {
  return std::min(num_tokens, shape().vocabulary_size) * shape().width * static_cast<int64_t>(sizeof(float));
}

// Returns the bytes, without the weights, for `batch` texts of the greatest length.
int64_t CaptionEncoder::needed_bytes(int64_t batch) const {
  const int64_t tokens = longest_input();
  const BatchMemory memory = planned_batch(*opened_.encoder, batch, tokens, device_);
  const auto own = static_cast<int64_t>(kMargin * static_cast<double>(memory.peak_bytes));
  return own + opened_.encoder->prefix_bytes(tokens) + renumbered_bytes(batch * tokens) +
         (device_.is_cpu() ? kProcessBytes : 0);
}

int64_t CaptionEncoder::batch_within_room(int64_t asked, int64_t usual) const {
  if (!streamed_) return asked > 0 ? asked : usual;
  const int64_t weights = streamed_->resident_bytes();
  int64_t batch = asked > 0 ? asked : usual;
  while (asked == 0 && batch > 1 && weights + needed_bytes(batch) > room_.bytes) batch /= 2;
  const int64_t needed = weights + needed_bytes(batch);
  if (needed > room_.bytes)
    fail("text",
         "{} leaves {:.2f} GiB for the text encoder, which takes {:.2f} GiB for {} texts of {} tokens: give "
         "more memory, a smaller --text-batch or fewer --text-max-tokens",
         room_.text, gib(room_.bytes), gib(needed), batch, longest_input());
  return batch;
}

std::string CaptionEncoder::streaming_text(int64_t batch) const {
  const int64_t batch_tokens = batch * longest_input();
  const BatchMemory memory = planned_batch(*opened_.encoder, batch, longest_input(), device_);
  const int64_t weights = streamed_->resident_bytes(), needed = needed_bytes(batch);
  const double bytes_per_token = static_cast<double>(memory.state_bytes) / static_cast<double>(batch_tokens);
  const auto tokens =
      batch_tokens +
      static_cast<int64_t>(static_cast<double>(room_.bytes - weights - needed) / bytes_per_token);
  return fmt::format(
      "text encoder: its {:.2f} GiB of weights do not fit {} ({:.2f} GiB free) and are read segment by "
      "segment; a pass over them reads {:.2f} GiB, takes at least {:.1f} s and serves about {} tokens",
      gib(weight_bytes(*opened_.encoder)), room_.text, gib(room_.bytes), gib(streamed_->bytes_of_pass()),
      seconds_of_pass(), tokens);
}

void CaptionEncoder::tokenize_instruction() {
  if (instruction_text_.empty()) return;
  const text::TokenIds empty = tokenizer_->encode(""), some = tokenizer_->encode("a");
  if (shape().users_see_padding || empty.size() != 1 || some.size() < 2 || some.front() != empty.front())
    fail("text",
         "--caption-instruction: the texts of {} do not begin with a token of their own, as Gemma's do: "
         "give --caption-prefix, whose rows are kept",
         shape().family);
  instruction_ = tokenizer_->encode(instruction_text_);
}

text::TokenIds CaptionEncoder::tokens_of(const std::string& text, int64_t& num_truncated) const {
  if (instruction_.empty() || text.empty()) return plain_tokens(text, num_truncated);
  // Sana keeps the first row and those from the instruction's last token on, which a caption may change: a
  // space at the end of an instruction becomes the beginning of a word.
  text::TokenIds ids = tokenizer_->encode(instruction_text_ + text);
  const auto kept = std::ssize(instruction_) - 1;
  if (std::ssize(ids) <= kept || !std::equal(ids.begin(), ids.begin() + kept, instruction_.begin()))
    fail("text", "the caption {:?} changes the tokens of --caption-instruction: end that with a line break",
         text.substr(0, 60));
  ids.erase(ids.begin() + 1, ids.begin() + kept);
  if (std::ssize(ids) > max_tokens_) {
    ++num_truncated;
    ids.resize(static_cast<size_t>(max_tokens_));
  }
  return ids;
}

text::TokenIds CaptionEncoder::plain_tokens(const std::string& text, int64_t& num_truncated) const {
  text::TokenIds ids = tokenizer_->encode(text, {.max_length = max_tokens_});
  if (static_cast<int64_t>(ids.size()) == max_tokens_ &&
      static_cast<int64_t>(tokenizer_->encode(text).size()) > max_tokens_)
    ++num_truncated;
  if (shape().users_see_padding) ids.resize(max_tokens_, tokenizer_->pad_id());
  return ids;
}

CaptionEncoder::Encoded CaptionEncoder::encode(std::span<const std::string> texts, int64_t batch,
                                               at::ScalarType dtype,
                                               const std::optional<std::string>& plain) const {
  Encoded encoded;
  std::vector<text::TokenIds> ids;
  for (const std::string& text : texts) ids.push_back(tokens_of(text, encoded.num_truncated));
  if (plain) ids.push_back(plain_tokens(*plain, encoded.num_truncated));
  encoded.rows = encode_captions(std::move(ids), texts.size(), batch, dtype);
  return encoded;
}

std::vector<at::Tensor> CaptionEncoder::encode_tokens(std::span<const text::TokenIds> ids, int64_t batch,
                                                      at::ScalarType dtype) const {
  return encode_captions({ids.begin(), ids.end()}, ids.size(), batch, dtype);
}

// Shows the encoder the instruction before the first `num_instructed` texts.
std::vector<at::Tensor> CaptionEncoder::encode_captions(std::vector<text::TokenIds> ids,
                                                        size_t num_instructed, int64_t batch,
                                                        at::ScalarType dtype) const {
  const int64_t hidden = num_hidden_tokens();
  // Only the empty text is a single token, the one that begins every text.
  std::vector<size_t> instructed;
  for (size_t i = 0; i < num_instructed && hidden > 0; ++i)
    if (ids[i].size() > 1) instructed.push_back(i);
  for (const size_t i : instructed)
    ids[i].insert(ids[i].begin() + 1, instruction_.begin() + 1, instruction_.begin() + 1 + hidden);
  std::vector<at::Tensor> rows = encode_inputs(ids, batch, dtype);
  for (const size_t i : instructed)
    rows[i] = at::cat({rows[i].narrow(0, 0, 1), rows[i].slice(0, 1 + hidden)});
  return rows;
}

std::vector<at::Tensor> CaptionEncoder::encode_inputs(std::span<const text::TokenIds> ids, int64_t batch,
                                                      at::ScalarType dtype) const {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> rows(ids.size());
  choose_prefix(ids);
  std::vector<bool> follows;  // true if the text continues the prefix
  for (const text::TokenIds& text : ids) follows.push_back(goes_on_after(text, prefix_.ids));
  std::vector<size_t> order(ids.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, {},
                           [&](size_t i) { return std::pair(static_cast<bool>(follows[i]), ids[i].size()); });

  const auto rows_of = [&](std::span<const text::TokenIds> parts) {
    TokenRows tokens{.host_offsets = {0}};
    text::TokenIds all;
    for (const text::TokenIds& part : parts) {
      all.insert(all.end(), part.begin(), part.end());
      tokens.host_offsets.push_back(static_cast<int64_t>(all.size()));
    }
    tokens.ids = at::tensor(all, at::kLong).to(device_);
    return tokens;
  };
  std::vector<TextBatch> batches;
  std::vector<std::span<const size_t>> members;  // indices of the texts of each batch
  const bool has_new_prefix = !prefix_.ids.empty() && !prefix_.last_hidden.defined();
  if (has_new_prefix) {
    batches.push_back({.tokens = rows_of(std::span(&prefix_.ids, 1)), .fills = &prefix_});
    members.emplace_back();
  }
  for (size_t first = 0, count = 0; first < order.size(); first += count) {
    const bool after_prefix = follows[order[first]];
    std::vector<text::TokenIds> parts;
    for (count = 0; first + count < order.size() && static_cast<int64_t>(count) < batch; ++count) {
      const text::TokenIds& text = ids[order[first + count]];
      if (follows[order[first + count]] != after_prefix) break;
      const size_t known = after_prefix ? prefix_.ids.size() : 0;
      parts.emplace_back(text.begin() + static_cast<std::ptrdiff_t>(known), text.end());
    }
    batches.push_back({.tokens = rows_of(parts), .after = after_prefix ? &prefix_ : nullptr});
    members.push_back(std::span(order).subspan(first, count));
  }
  encode_batches(batches, [&](size_t b, const at::Tensor& last_hidden) {
    if (batches[b].fills) {
      prefix_.last_hidden = last_hidden.to(at::kCPU);
      return;
    }
    const at::Tensor features = last_hidden.to(dtype).to(at::kCPU);
    const std::vector<int64_t>& offsets = batches[b].tokens.host_offsets;
    for (size_t i = 0; i < members[b].size(); ++i) {
      const at::Tensor own = features.narrow(0, offsets[i], offsets[i + 1] - offsets[i]);
      rows[members[b][i]] = batches[b].after ? at::cat({prefix_.last_hidden.to(dtype), own}) : own;
    }
  });
  return rows;
}

std::vector<at::Tensor> CaptionEncoder::weights() const {
  std::vector<at::Tensor> weights;
  if (streamed_) return weights;
  for (const auto& parameter : opened_.encoder->parameters()) weights.push_back(parameter->value);
  return weights;
}

// Chooses by the texts of this call alone, so that earlier calls do not change the bits of the result.
void CaptionEncoder::choose_prefix(std::span<const text::TokenIds> ids) const {
  if (opened_.encoder->prefix_bytes(1) == 0) return;
  std::vector<int64_t> best = best_shared_prefix(ids);
  if (best.empty() ? !prefix_.ids.empty() : best != prefix_.ids) prefix_ = {.ids = std::move(best)};
}

void CaptionEncoder::encode_batches(std::span<const TextBatch> batches,
                                    const std::function<void(size_t, at::Tensor)>& take) const {
  if (streamed_) return encode_streamed(batches, take);
  for (size_t b = 0; b < batches.size(); ++b) take(b, opened_.encoder->encode_batch(batches[b]));
}

// Takes as many batches in each pass over the weights as there is room for their states between two segments.
void CaptionEncoder::encode_streamed(std::span<const TextBatch> batches,
                                     const std::function<void(size_t, at::Tensor)>& take) const {
  // Counts the prefix as if each text had its own. That is true of the result, which stays on the host;
  // elsewhere it overestimates.
  const auto offsets_of_whole_texts = [&](const TextBatch& batch) {
    std::vector<int64_t> offsets = batch.tokens.host_offsets;
    const auto before = batch.after ? static_cast<int64_t>(batch.after->ids.size()) : int64_t{0};
    for (size_t i = 0; i < offsets.size(); ++i) offsets[i] += static_cast<int64_t>(i) * before;
    return offsets;
  };
  int64_t rows_bytes = 0;
  for (const TextBatch& batch : batches) rows_bytes += renumbered_bytes(offsets_of_whole_texts(batch).back());
  const int64_t fixed = streamed_->resident_bytes() +
                        opened_.encoder->prefix_bytes(static_cast<int64_t>(prefix_.ids.size())) +
                        (device_.is_cpu() ? rows_bytes + kProcessBytes : 0);
  for (size_t first = 0, last = 0; first < batches.size(); first = last) {
    for (int64_t states = 0, most = 0; last < batches.size(); ++last) {
      const std::vector<int64_t> offsets = offsets_of_whole_texts(batches[last]);
      const BatchMemory memory = planned_batch(*opened_.encoder, offsets, device_);
      states += memory.state_bytes;
      most = std::max(most, static_cast<int64_t>(kMargin * static_cast<double>(memory.peak_bytes)) +
                                renumbered_bytes(offsets.back()));
      if (last > first && fixed + states + most > room_.bytes) break;
    }
    streamed_->encode(batches.subspan(first, last - first),
                      [&](size_t b, at::Tensor hidden) { take(first + b, std::move(hidden)); });
  }
}

TextRows joined_rows(const std::vector<at::Tensor>& rows, at::ScalarType dtype) {
  TextRows text{.rows = at::cat(rows).to(dtype), .host_offsets = {0}};
  std::vector<int32_t> offsets = {0};
  for (const at::Tensor& part : rows) {
    text.host_offsets.push_back(text.host_offsets.back() + part.size(0));
    offsets.push_back(static_cast<int32_t>(text.host_offsets.back()));
  }
  text.offsets = at::tensor(offsets, at::kInt);
  return text;
}

}  // namespace kiln
