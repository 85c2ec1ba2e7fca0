// store.json and a shard from hostile bytes: u16 length of store.json, store.json, then the shard's
// safetensors. Whatever is accepted must be readable to the last byte.
#include <cstring>

#include "core/error.h"
#include "data/store/latent_kernels.h"
#include "data/store/store_shard.h"

namespace {

void read_everything(const kiln::StoreShard& shard, const kiln::StoreInfo& info) {
  std::vector<float> values(shard.latent_elements());
  for (int64_t i = 0; i < shard.num_samples(); ++i) {
    for (int64_t flip = 0; flip < info.num_flips; ++flip) {
      kiln::latents_to_f32(info.dtype, shard.latents(kiln::StoreShard::kMean, i, flip), values);
      kiln::find_nonfinite(values);
      if (info.has_logvar)
        kiln::latents_to_f32(info.dtype, shard.latents(kiln::StoreShard::kLogvar, i, flip), values);
    }
    const std::string text = std::string(shard.name(i)) + std::string(shard.caption(i));
    if (shard.label(i) >= static_cast<int64_t>(info.class_names.size()) || text.size() > (1u << 30))
      __builtin_trap();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const size_t text_size = std::min<size_t>(data[0] | data[1] << 8, size - 2);
  const std::string_view text(reinterpret_cast<const char*>(data) + 2, text_size);
  // A copy, so that reading beyond its end is seen; 8-byte aligned as a mapped file is.
  const std::vector<std::byte> bytes(reinterpret_cast<const std::byte*>(data) + 2 + text_size,
                                     reinterpret_cast<const std::byte*>(data) + size);
  try {
    const kiln::StoreInfo info = kiln::parse_store_info(text, "fuzz");
    const kiln::StoreInfo again = kiln::parse_store_info(kiln::store_info_text(info), "again");
    if (kiln::store_info_text(again) != kiln::store_info_text(info)) __builtin_trap();
    for (const auto& entry : info.shards) {
      if (info.latent_size(entry.lane) > 1 << 20) break;
      const kiln::StoreShard shard(kiln::parse_safetensors(bytes, "fuzz"), info, entry, "fuzz");
      read_everything(shard, info);
    }
  } catch (const kiln::Error&) {
  }
  return 0;
}
