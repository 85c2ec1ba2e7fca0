#include "models/text/caption_encoder.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <optional>

#include "core/aten.h"
#include "core/error.h"
#include "core/json_config.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kManyTokens = 300;  // of encoders that take any number: PixArt-Sigma's and Sana's length
constexpr int64_t kMostTokens = 1 << 16;

// What sentence-transformers cuts at, where its file says so.
std::optional<int64_t> sentence_length(const fs::path& folder) {
  const fs::path path = folder / "sentence_bert_config.json";
  if (!fs::exists(path)) return std::nullopt;
  std::ifstream file(path);
  const auto config = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
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
                               at::ScalarType compute_dtype)
    : tokenizer_(text::load_tokenizer(folder)), loaded_(load_text_encoder(folder, device, compute_dtype)) {
  if (tokenizer_->vocabulary_size() > shape().vocabulary_size)
    fail("text", "the tokenizer of {} has {} tokens, its encoder {}: they do not belong together", folder,
         tokenizer_->vocabulary_size(), shape().vocabulary_size);
  max_tokens_ = max_tokens_of(folder, max_tokens, shape(), *tokenizer_);
}

text::TokenIds CaptionEncoder::tokens_of(const std::string& text, int64_t& num_truncated) const {
  text::TokenIds ids = tokenizer_->encode(text, {.max_length = max_tokens_});
  if (static_cast<int64_t>(ids.size()) == max_tokens_ &&
      static_cast<int64_t>(tokenizer_->encode(text).size()) > max_tokens_)
    ++num_truncated;
  if (shape().users_see_padding) ids.resize(max_tokens_, tokenizer_->pad_id());
  return ids;
}

CaptionEncoder::Encoded CaptionEncoder::encode(std::span<const std::string> texts, int64_t batch) const {
  const at::NoGradGuard no_grad;
  Encoded encoded{.rows = std::vector<at::Tensor>(texts.size())};
  std::vector<text::TokenIds> ids;
  for (const std::string& text : texts) ids.push_back(tokens_of(text, encoded.num_truncated));
  std::vector<size_t> by_length(texts.size());
  std::iota(by_length.begin(), by_length.end(), 0);
  std::stable_sort(by_length.begin(), by_length.end(),
                   [&](size_t a, size_t b) { return ids[a].size() < ids[b].size(); });
  for (size_t first = 0; first < texts.size(); first += static_cast<size_t>(batch)) {
    const size_t last = std::min(first + static_cast<size_t>(batch), texts.size());
    TokenRows tokens{.host_offsets = {0}};
    text::TokenIds all;
    for (size_t i = first; i < last; ++i) {
      all.insert(all.end(), ids[by_length[i]].begin(), ids[by_length[i]].end());
      tokens.host_offsets.push_back(static_cast<int64_t>(all.size()));
    }
    const auto& parameters = loaded_.encoder->parameters();
    tokens.ids = at::tensor(all, at::kLong).to(parameters.front()->value.device());
    const at::Tensor features = loaded_.encoder->encode(tokens).last_hidden.to(at::kCPU, at::kFloat);
    for (size_t i = first; i < last; ++i) {
      const int64_t begin = tokens.host_offsets[i - first], end = tokens.host_offsets[i - first + 1];
      encoded.rows[by_length[i]] = features.narrow(0, begin, end - begin);
    }
  }
  return encoded;
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
