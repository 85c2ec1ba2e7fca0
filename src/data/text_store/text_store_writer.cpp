#include "data/text_store/text_store_writer.h"

#include <filesystem>
#include <vector>

#include "core/error.h"
#include "core/files/atomic_file.h"
#include "core/files/mapped_file.h"
#include "core/files/xxh3.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;

// The settings that equal stores share, each by the name that a user knows.
std::vector<std::pair<std::string, std::string>> settings_of(const TextStoreInfo& info) {
  return {{"the text encoder", info.encoder + " " + info.encoder_fingerprint},
          {"the tokenizer", info.tokenizer_fingerprint},
          {"--text-max-tokens", std::to_string(info.max_tokens)},
          {"--text-dtype", std::string(dtype_name(info.dtype))},
          {"--compute-dtype", info.compute_dtype},
          {"--caption-prefix", info.prefix},
          {"--caption-suffix", info.suffix},
          {"--caption-instruction", info.instruction},
          {"the samples or their captions", info.captions_fingerprint},
          {"captions per shard", std::to_string(info.entries_per_shard)}};
}

void refuse_other_settings(const std::string& folder, const TextStoreInfo& found,
                           const TextStoreInfo& wanted) {
  const auto theirs = settings_of(found), ours = settings_of(wanted);
  std::string differences;
  for (size_t i = 0; i < ours.size(); ++i)
    if (theirs[i].second != ours[i].second)
      differences += fmt::format("{}{} ({} there, {} here)", differences.empty() ? "" : ", ", ours[i].first,
                                 theirs[i].second, ours[i].second);
  if (!differences.empty())
    fail("text store", "{} was made with other settings: {}: choose another --text-name or remove it", folder,
         differences);
}

std::string file_xxh3(const std::string& path) { return xxh3_hex(MappedFile("text store", path).bytes()); }

}  // namespace

TextStoreWriter::TextStoreWriter(std::string folder, TextStoreInfo info, const CaptionTable& table,
                                 bool joins)
    : folder_(std::move(folder)), info_(std::move(info)) {
  std::error_code error;
  fs::create_directories(folder_, error);
  if (error) fail("text store", "cannot make {}: {}", folder_, error.message());
  if (!joins)
    lock_ = std::make_unique<FileLock>(
        "text store", folder_,
        fmt::format("another process is writing {}: wait for it or choose another --text-name", folder_));
  info_.num_samples = table.num_samples();
  info_.num_entries = table.num_entries();
  info_.num_without_caption = table.num_without_caption();
  info_.kinds = table.kind_names();
  info_.captions_fingerprint = table.fingerprint();
  info_.samples_xxh3 = table.samples_xxh3();
  info_.complete = false;
  if (fs::exists(folder_ + "/text.json")) {
    const TextStoreInfo found = read_text_store_info(folder_);
    refuse_other_settings(folder_, found, info_);
    is_complete_ = found.complete;
    if (is_complete_) info_ = found;
    return;
  }
  write_info();
}

void TextStoreWriter::write_info() const {
  write_file_atomically("text store", folder_ + "/text.json", text_store_info_text(info_));
}

bool TextStoreWriter::has_shard(int64_t shard) const {
  if (!fs::exists(features_path(folder_, shard))) return false;
  try {
    return FeaturesFile(folder_, info_, shard).has_checksums();  // an earlier version wrote none
  } catch (const Error&) {
    return false;  // the shard is written again
  }
}

void TextStoreWriter::write_shard(int64_t shard, std::span<const int64_t> rows_of_entry,
                                  std::span<const std::byte> features, int64_t num_truncated) {
  write_features_file(folder_, info_, shard, rows_of_entry, features, num_truncated);
}

void TextStoreWriter::finish(const CaptionTable& table) {
  write_captions_file(folder_, table);
  info_.captions_xxh3 = file_xxh3(captions_path(folder_));
  info_.shards_xxh3.clear();
  info_.columns_xxh3.clear();
  info_.num_truncated = 0;
  for (int64_t shard = 0; shard < info_.num_shards(); ++shard) {
    const FeaturesFile file(folder_, info_, shard);
    info_.num_truncated += file.num_truncated();
    info_.columns_xxh3.push_back(file.columns_xxh3());
    info_.shards_xxh3.push_back(file_xxh3(features_path(folder_, shard)));
  }
  info_.complete = true;
  write_info();
}

}  // namespace kiln
