// kiln extract --text-encoder: captions of a feature store's samples -> text store.
#pragma once
#include <cstdint>
#include <string>

#include "extract/caption_sources.h"
#include "parallel/ranks/process_group.h"

namespace kiln {

struct TextExtractOptions {
  std::string encoder;  // folder of a text encoder and its tokenizer, or of a pipeline with both; "": no text
  std::string name;     // of the store, STORE/text-NAME; "" = the encoder's family
  std::string dtype;    // of the features: f32 | bf16 | fp16; "" = by encoder
  int64_t max_tokens = 0;  // longer captions are cut; 0 = by encoder
  int64_t batch = 0;       // captions encoded at once; 0 = by device
  // That each rank may take of its device, on a CPU of resident memory: an encoder that does not fit is read
  // segment by segment. "" = what is free.
  std::string memory;
  CaptionOptions captions;
};

// Encodes the captions that the pictures of `data` have for the samples of the complete feature store in
// `store`, equal ones once. Continues what an interrupted run left; several ranks take shards in turn, and
// the store's bytes do not depend on either. Throws Error: a sample that `data` lacks, no captions at all, a
// store of another encoder. `grown`: the store that this one is a part of, whose captions must have been
// encoded likewise; "": it is one of its own.
void extract_text(const TextExtractOptions& options, const std::string& data, const std::string& store,
                  const std::string& compute_dtype, const std::string& device, ProcessGroup& group,
                  const std::string& grown = "");

}  // namespace kiln
