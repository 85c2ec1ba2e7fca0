#include "extract/text_settings.h"

#include <filesystem>

#include "core/error.h"
#include "core/tensors.h"
#include "parallel/machine.h"

namespace kiln {

EncoderRoom encoder_room(const TextExtractOptions& options, at::Device device, EncoderRoom otherwise) {
  constexpr const char* kOption = "text-encoder-memory";
  if (options.memory.empty()) return otherwise;
  return {.bytes = bytes_left_of(kOption, options.memory, device),
          .text = fmt::format("--{} {}", kOption, options.memory)};
}

TextStoreInfo describe_text(const CaptionEncoder& encoder, const TextExtractOptions& options,
                            const std::string& compute_dtype) {
  const TextEncoderShape& shape = encoder.shape();
  TextStoreInfo info;
  info.encoder = shape.family;
  info.encoder_fingerprint = encoder.encoder_fingerprint();
  info.tokenizer_fingerprint = encoder.tokenizer_fingerprint();
  info.encoder_path = std::filesystem::absolute(options.encoder).lexically_normal().string();
  info.width = shape.width;
  info.max_tokens = encoder.max_tokens();
  info.padded = shape.users_see_padding;
  info.dtype = from_scalar_type(options.dtype.empty() ? shape.storage_dtype
                                                      : parse_compute_dtype(options.dtype, "--text-dtype"));
  info.prefix = options.captions.prefix;
  info.suffix = options.captions.suffix;
  info.instruction = options.captions.instruction;
  info.compute_dtype = compute_dtype;
  return info;
}

void require_captions(const CaptionTable& table, const std::string& data) {
  if (table.num_entries() > 1) return;
  fail("extract",
       "none of the {} samples in {} has a caption: expected metadata.jsonl with text, .txt beside the "
       "pictures or in the tars, or choose --captions png-text or file-names",
       table.num_samples(), data);
}

}  // namespace kiln
