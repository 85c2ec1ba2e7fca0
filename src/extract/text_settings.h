// The settings that decide the features of captions, for a text store and for training that encodes them
// itself.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "data/text_store/text_store_info.h"
#include "extract/caption_sources.h"
#include "models/text/caption_encoder.h"

namespace kiln {

struct TextExtractOptions {
  std::string encoder{};   // folder of a text encoder and its tokenizer, or of a pipeline; "": no text
  std::string name{};      // of the store, STORE/text-NAME; "" = the encoder's family
  std::string dtype{};     // of the features: f32 | bf16 | fp16; "" = by encoder
  int64_t max_tokens = 0;  // longer captions are cut; 0 = by encoder
  int64_t batch = 0;       // captions encoded at once; 0 = by device
  // The memory that each rank may take on its device; on a CPU, resident memory. An encoder that does not fit
  // is read segment by segment. "" = what is free.
  std::string memory{};
  CaptionOptions captions{};
};

// Returns the room that --text-encoder-memory leaves on the device, or `otherwise` without this option.
// Throws Error if it leaves none.
EncoderRoom encoder_room(const TextExtractOptions& options, at::Device device, EncoderRoom otherwise);

// Returns the info of a text store of such captions, without the fields about its samples. `compute_dtype` is
// the encoder's.
TextStoreInfo describe_text(const CaptionEncoder& encoder, const TextExtractOptions& options,
                            const std::string& compute_dtype);

// Throws Error if no sample of the table has a caption. `data` names its pictures in the message.
void require_captions(const CaptionTable& table, const std::string& data);

}  // namespace kiln
