// What decides about the features of captions, for a store of them and for training that encodes on the way.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "data/text_store/text_store_info.h"
#include "extract/caption_sources.h"
#include "models/text/caption_encoder.h"

namespace kiln {

struct TextExtractOptions {
  std::string
      encoder{};        // folder of a text encoder and its tokenizer, or of a pipeline with both; "": no text
  std::string name{};   // of the store, STORE/text-NAME; "" = the encoder's family
  std::string dtype{};  // of the features: f32 | bf16 | fp16; "" = by encoder
  int64_t max_tokens = 0;  // longer captions are cut; 0 = by encoder
  int64_t batch = 0;       // captions encoded at once; 0 = by device
  // That each rank may take of its device, on a CPU of resident memory: an encoder that does not fit is read
  // segment by segment. "" = what is free.
  std::string memory{};
  CaptionOptions captions{};
};

// The room that --text-encoder-memory leaves on the device; without it, `otherwise`. Throws Error: none.
EncoderRoom encoder_room(const TextExtractOptions& options, at::Device device, EncoderRoom otherwise);

// What such captions say of themselves, but for the samples that have them. `compute_dtype`: of the encoder.
TextStoreInfo describe_text(const CaptionEncoder& encoder, const TextExtractOptions& options,
                            const std::string& compute_dtype);

// Throws Error: none of the table's samples, from the pictures of `data`, has a caption.
void require_captions(const CaptionTable& table, const std::string& data);

}  // namespace kiln
