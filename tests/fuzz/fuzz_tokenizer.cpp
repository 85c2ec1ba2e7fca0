// Any bytes as a SentencePiece model.
#include "core/error.h"
#include "text/tokenizers/sentencepiece_model.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    kiln::text::parse_sentencepiece_model(std::string(reinterpret_cast<const char*>(data), size), "fuzz");
  } catch (const kiln::Error&) {
  }
  return 0;
}
