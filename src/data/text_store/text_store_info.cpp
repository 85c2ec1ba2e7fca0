// Converts text.json to TextStoreInfo, with every field checked, and back.
#include "data/text_store/text_store_info.h"

#include <algorithm>
#include <filesystem>

#include "core/error.h"
#include "core/files/entries.h"
#include "core/files/input_file.h"
#include "core/json.h"
#include "core/json_config.h"
#include "core/json_fields.h"
#include "core/text/json_text.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kTextFormatName = "kiln text store";
constexpr int64_t kFormatVersion = 1;
constexpr const char* kFolderPrefix = "text-";
constexpr int64_t kMostTokens = 1 << 20, kMostWidth = 1 << 20, kMostSamples = int64_t{1} << 40;

int64_t count(const JsonConfig& fields, const char* key, int64_t least, int64_t most,
              const std::string& where) {
  const auto value = fields.require<int64_t>(key);
  if (value < least || value > most)
    fail("text store", "expected \"{}\" from {} to {}, got {} ({})", key, least, most, value, where);
  return value;
}

}  // namespace

TextStoreInfo parse_text_store_info(std::string_view text, const std::string& where) {
  const json object = json_or_discarded("text store", text, where);
  if (!object.is_object()) fail("text store", "expected a JSON object ({})", where);
  const JsonConfig fields("text store, " + where, object);
  if (fields.get<std::string>("format", "") != kTextFormatName)
    fail("text store", "expected \"format\": \"{}\" ({})", kTextFormatName, where);
  if (const auto version = fields.get<int64_t>("format_version", 0); version != kFormatVersion)
    fail("text store", "expected format_version {}, got {}{} ({})", kFormatVersion, version,
         version > kFormatVersion ? ": update Kiln" : "", where);
  TextStoreInfo info;
  info.encoder = fields.require<std::string>("encoder");
  info.encoder_fingerprint = fields.require<std::string>("encoder_fingerprint");
  info.tokenizer_fingerprint = fields.require<std::string>("tokenizer_fingerprint");
  info.encoder_path = fields.get<std::string>("encoder_path", "");
  info.width = count(fields, "width", 1, kMostWidth, where);
  info.max_tokens = count(fields, "max_tokens", 1, kMostTokens, where);
  info.padded = fields.get("padded", false);
  info.dtype = parse_dtype(fields.require<std::string>("dtype"));
  if (info.dtype != Dtype::kF32 && info.dtype != Dtype::kF16 && info.dtype != Dtype::kBF16)
    fail("text store", "expected \"dtype\" F32, BF16 or F16, got {} ({})", dtype_name(info.dtype), where);
  KILN_GET_FIELDS(fields, info, prefix, suffix, instruction, compute_dtype);
  info.captions_fingerprint = fields.require<std::string>("captions_fingerprint");
  info.num_samples = count(fields, "num_samples", 1, kMostSamples, where);
  info.num_entries = count(fields, "num_entries", 1, kMostSamples, where);
  info.entries_per_shard = count(fields, "entries_per_shard", 1, INT32_MAX, where);
  info.num_truncated = count(fields, "num_truncated", 0, info.num_entries, where);
  info.num_without_caption = count(fields, "num_without_caption", 0, info.num_samples, where);
  KILN_GET_FIELDS(fields, info, kinds, complete, captions_xxh3, shards_xxh3);
  if (info.complete && static_cast<int64_t>(info.shards_xxh3.size()) != info.num_shards())
    fail("text store", "expected {} shards of {} captions, got {} ({})", info.num_shards(), info.num_entries,
         info.shards_xxh3.size(), where);
  KILN_GET_FIELDS(fields, info, samples_xxh3, columns_xxh3);
  if (info.complete && !info.columns_xxh3.empty() && info.columns_xxh3.size() != info.shards_xxh3.size())
    fail("text store", "expected \"columns_xxh3\" of {} shards, got {} ({})", info.shards_xxh3.size(),
         info.columns_xxh3.size(), where);
  return info;
}

std::string text_store_info_text(const TextStoreInfo& info) {
  json object = {
      {"format", kTextFormatName}, {"format_version", kFormatVersion}, {"dtype", dtype_name(info.dtype)}};
  KILN_WRITE_FIELDS(object, info, encoder, encoder_fingerprint, tokenizer_fingerprint, encoder_path, width,
                    max_tokens, padded, prefix, suffix, instruction, compute_dtype, captions_fingerprint,
                    num_samples, num_entries, entries_per_shard, num_truncated, num_without_caption, kinds,
                    samples_xxh3, captions_xxh3, shards_xxh3, columns_xxh3, complete);
  return object.dump(2) + "\n";
}

TextStoreInfo read_text_store_info(const std::string& folder) {
  const std::string path = folder + "/text.json";
  if (!fs::exists(path)) fail("text store", "{} is no text store: it holds no text.json", folder);
  constexpr JsonOptions kLimits;
  return parse_text_store_info(read_input("text store", path, kLimits.most_bytes), path);
}

std::vector<std::string> find_text_stores(const std::string& feature_store) {
  std::vector<std::string> names;
  if (!fs::is_directory(feature_store)) return names;
  for (const auto& entry : entries_of(feature_store)) {
    const std::string name = entry.path().filename();
    if (entry.is_directory() && name.starts_with(kFolderPrefix) && fs::exists(entry.path() / "text.json"))
      names.push_back(name.substr(std::string_view(kFolderPrefix).size()));
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string text_store_folder(const std::string& feature_store, const std::string& name) {
  const bool is_plain =
      !name.empty() && name.find('/') == std::string::npos && name.find('\0') == std::string::npos;
  if (!is_plain) fail("text store", "expected a plain name, got {:?}", name);
  return feature_store + "/" + kFolderPrefix + name;
}

}  // namespace kiln
