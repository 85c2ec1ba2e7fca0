#include "sample/prompts.h"

#include <filesystem>
#include <fstream>
#include <map>
#include <span>

#include "core/aten.h"
#include "core/error.h"
#include "core/tensors.h"
#include "models/load_model.h"
#include "models/piece_checks.h"
#include "models/text/caption_encoder.h"
#include "parallel/machine.h"
#include "text/tokenizers/unicode.h"

namespace kiln {
namespace {

constexpr int64_t kPromptsAtOnce = 32;

CaptionEncoder load_encoder(const ModelRecord::TextInfo& trained, const std::string& given, at::Device device,
                            at::ScalarType compute_dtype, int64_t num_processes, bool anyway) {
  const std::string& folder = given.empty() ? trained.encoder_path : given;
  std::error_code unreachable;
  if (folder.empty() || !std::filesystem::exists(folder, unreachable))
    fail("sample", "prompts need the text encoder {}{}: give --text-encoder DIR",
         trained.encoder.empty() ? "of the training captions" : trained.encoder,
         folder.empty() ? "" : fmt::format(", and {} does not exist", folder));
  CaptionEncoder encoder(folder, trained.max_tokens, device, compute_dtype,
                         {.bytes = usable_bytes(device, num_processes), .text = "what is free"},
                         EncoderUse::kEncode, trained.instruction);
  const ModelRecord::TextInfo found{.encoder = encoder.shape().family,
                                    .encoder_fingerprint = encoder.encoder_fingerprint(),
                                    .tokenizer_fingerprint = encoder.tokenizer_fingerprint()};
  if (const std::string text = text_encoder_mismatch(trained, found, folder); !text.empty())
    say_mismatch(text, "give the recorded one with --text-encoder", anyway);
  return encoder;
}

}  // namespace

std::vector<std::string> read_prompts(const std::string& path) {
  std::ifstream file(path);  // or a pipe
  if (!file) fail("sample", "--prompts {} cannot be read: give a file with one prompt a line", path);
  std::vector<std::string> prompts;
  std::string line;
  for (int64_t number = 1; std::getline(file, line); ++number) {
    if (line.ends_with('\r')) line.pop_back();
    try {
      text::check_utf8(line);
    } catch (const Error& error) {
      fail("sample", "--prompts {}, line {}: {}", path, number, message_of(error));
    }
    if (line.find_first_not_of(" \t") != std::string::npos) prompts.push_back(line);
  }
  if (file.bad()) fail("sample", "--prompts {} could not be read to its end", path);
  if (prompts.empty()) fail("sample", "--prompts {} has no prompts: give one a line", path);
  return prompts;
}

Prompts encode_prompts(const ModelRecord::TextInfo& trained, const std::string& folder,
                       std::vector<std::string> texts, const std::string& negative,
                       const ConditioningShape& shape, at::Device device, at::ScalarType compute_dtype,
                       int64_t num_processes, bool anyway) {
  CaptionEncoder encoder = load_encoder(trained, folder, device, compute_dtype, num_processes, anyway);
  if (trained.max_tokens == 0) encoder.limit_tokens(shape.max_text_tokens);
  return encode_prompts(encoder, trained, std::move(texts), negative, shape);
}

Prompts encode_prompts(const CaptionEncoder& encoder, const ModelRecord::TextInfo& trained,
                       std::vector<std::string> texts, const std::string& negative,
                       const ConditioningShape& shape) {
  if (encoder.shape().width != shape.text_width)
    fail("sample",
         "the model takes captions of width {}, the text encoder {} makes {}: give the text encoder that the "
         "model was trained with",
         shape.text_width, encoder.shape().family, encoder.shape().width);
  const auto decorated = [&](const std::string& text) {
    return text.empty() ? text : trained.prefix + text + trained.suffix;
  };
  std::vector<std::string> asked;  // each text once
  std::map<std::string, size_t> places;
  for (const std::string& text : texts)
    if (places.emplace(text, asked.size()).second) asked.push_back(decorated(text));
  const int64_t batch = encoder.batch_within_room(0, kPromptsAtOnce);
  if (encoder.is_streamed()) fmt::print(stderr, "{}\n", encoder.streaming_text(batch));
  const bool needs_null = !negative.empty() || !shape.has_null_text;
  CaptionEncoder::Encoded encoded = encoder.encode(
      asked, batch, at::kFloat, needs_null ? std::optional(decorated(negative)) : std::nullopt);
  const at::ScalarType dtype = to_scalar_type(trained.dtype);
  Prompts prompts{.texts = std::move(texts), .encoder_fingerprint = encoder.encoder_fingerprint()};
  if (needs_null) prompts.null = joined_rows({encoded.rows.back()}, dtype);
  std::vector<at::Tensor> rows;
  for (const std::string& text : prompts.texts) rows.push_back(encoded.rows[places.at(text)]);
  prompts.rows = joined_rows(rows, dtype);
  if (encoded.num_truncated > 0)
    fmt::print(stderr, "warning: {} of {} prompts have more than {} tokens and are cut\n",
               encoded.num_truncated, asked.size() + 1, encoder.max_tokens());
  return prompts;
}

ConditioningFn with_prompts(ConditioningFn others, const Prompts& prompts,
                            std::vector<int64_t> prompt_of_image) {
  if (!prompts.rows.defined()) return others;
  return [others = std::move(others), rows = prompts.rows, prompt_of_image = std::move(prompt_of_image)](
             int64_t first, int64_t count) {
    Conditioning conditioning = others(first, count);
    conditioning.text = select_texts(
        rows, std::span(prompt_of_image).subspan(static_cast<size_t>(first), static_cast<size_t>(count)));
    return conditioning;
  };
}

ConditioningFn with_image_size(const ConditioningShape& shape, ConditioningFn others, int64_t height,
                               int64_t width) {
  if (!shape.takes_image_size) return others;
  return [others = std::move(others), h = static_cast<float>(height), w = static_cast<float>(width)](
             int64_t first, int64_t count) {
    Conditioning conditioning = others(first, count);
    conditioning.image_hw = at::tensor({h, w}, at::kFloat).expand({count, 2}).contiguous();
    conditioning.aspect_ratio = at::full({count, 1}, h / w, at::kFloat);
    return conditioning;
  };
}

}  // namespace kiln
