// Options of captions: of kiln extract, and of a run that encodes them while it trains. Torch-free.
#pragma once
#include <cstdint>
#include <string>

namespace kiln {

struct CaptionOptions {
  // Comma-separated: data | png-text | file-names. A picture has the captions of all of them.
  std::string sources = "data";
  std::string prefix{}, suffix{};  // around every caption
  std::string instruction{};       // the encoder sees it before every caption; its rows are not kept
};

struct CaptionEncodingOptions : CaptionOptions {
  std::string encoder{};   // folder of a text encoder and its tokenizer, or of a pipeline; "": no text
  std::string name{};      // of the store, STORE/text-NAME; "": the encoder's family
  std::string dtype{};     // of the features: f32 | bf16 | fp16; "": depends on the encoder
  int64_t max_tokens = 0;  // longer captions are cut; 0: depends on the encoder
  int64_t batch = 0;       // captions encoded at once; 0: depends on the device; in a run as many as images
  // The memory that each rank may take on its device; on a CPU, resident memory. An encoder that does not fit
  // is read segment by segment. "": what is free; in a run as much as it needs.
  std::string memory{};
};

}  // namespace kiln
