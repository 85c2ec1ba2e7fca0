// Any bytes as the files of a published tokenizer of one of the four kinds, and as a text that it encodes.
#include "fuzz/cut_folder.h"
#include "text/tokenizers/tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr const char* kNames[] = {"vocab.txt",
                                    "vocab.json",
                                    "merges.txt",
                                    "spiece.model",
                                    "tokenizer.model",
                                    "tokenizer_config.json",
                                    "special_tokens_map.json",
                                    "added_tokens.json",
                                    "tokenizer.json",
                                    "text"};
  const kiln::test::CutFolder folder(kNames, data, size);
  try {
    const auto tokenizer = kiln::text::load_tokenizer(folder.name());
    const std::string text = kiln::test::text_of(folder.path("text"));
    const kiln::text::TokenIds ids = tokenizer->encode(text);
    if (tokenizer->encode(text) != ids) __builtin_trap();
    tokenizer->encode(text, text, {.max_length = 8});
  } catch (const kiln::Error&) {
  }
  return 0;
}
