// Any bytes as text.json: what is accepted is written as it was read.
#include "core/error.h"
#include "data/text_store/text_files.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const kiln::TextStoreInfo info =
        kiln::parse_text_store_info({reinterpret_cast<const char*>(data), size}, "fuzz");
    const std::string text = kiln::text_store_info_text(info);
    if (kiln::text_store_info_text(kiln::parse_text_store_info(text, "again")) != text) __builtin_trap();
    if (info.num_shards() < 1 || kiln::shard_entries(info, info.num_shards() - 1).count < 1) __builtin_trap();
  } catch (const kiln::Error&) {
  }
  return 0;
}
