#include "data/text_store/text_files.h"

#include <algorithm>
#include <charconv>

#include "core/error.h"

namespace kiln {
namespace {

constexpr const char* kIdentity = "kiln_text_store";  // metadata: identity_of() the store
constexpr const char* kTruncated = "num_truncated";
constexpr const char* kEntryChecksums = "entry_xxh3";

// Returns everything that decides the features, as text.
std::string identity_of(const TextStoreInfo& info) {
  return fmt::format("{} {} {} {} {} {} {} {}{}", info.encoder_fingerprint, info.tokenizer_fingerprint,
                     info.captions_fingerprint, dtype_name(info.dtype), info.max_tokens, info.padded,
                     info.compute_dtype, info.entries_per_shard,
                     info.instruction.empty() ? "" : " after " + info.instruction);
}

template <class T>
std::span<const T> column(const TensorFile& file, const std::string& name, Dtype dtype, int64_t size,
                          const std::string& path) {
  const auto found = file.tensors().find(name);
  if (found == file.tensors().end()) fail("text store", "{} lacks tensor {}", path, name);
  const TensorView& view = found->second;
  if (view.dtype != dtype || view.shape.size() != 1 || (size >= 0 && view.shape[0] != size))
    fail("text store", "expected tensor {} of {} to be {} of {} elements", name, path, dtype_name(dtype),
         size >= 0 ? std::to_string(size) : "any number of");
  if (reinterpret_cast<uintptr_t>(view.bytes.data()) % alignof(T) != 0)
    fail("text store", "tensor {} of {} is not aligned", name, path);
  return {reinterpret_cast<const T*>(view.bytes.data()), static_cast<size_t>(view.shape[0])};
}

// Throws Error unless the offsets go from 0 to `last` and never fall.
void check_offsets(std::span<const int64_t> offsets, int64_t last, const char* name,
                   const std::string& path) {
  if (offsets.front() != 0 || offsets.back() != last || !std::is_sorted(offsets.begin(), offsets.end()))
    fail("text store", "the {} of {} do not rise from 0 to {}", name, path, last);
}

TensorView view_of(Dtype dtype, std::vector<int64_t> shape, std::span<const std::byte> bytes) {
  return {.dtype = dtype, .shape = std::move(shape), .bytes = bytes};
}

template <class T>
NamedTensor named_column(const char* name, Dtype dtype, const std::vector<T>& values) {
  return {name, view_of(dtype, {static_cast<int64_t>(values.size())}, std::as_bytes(std::span(values)))};
}

}  // namespace

std::string captions_path(const std::string& folder) { return folder + "/captions.safetensors"; }

std::string features_path(const std::string& folder, int64_t shard) {
  return fmt::format("{}/features-{:05}.safetensors", folder, shard);
}

EntryRange shard_entries(const TextStoreInfo& info, int64_t shard) {
  const int64_t first = shard * info.entries_per_shard;
  return {first, std::min(info.entries_per_shard, info.num_entries - first)};
}

CaptionsFile::CaptionsFile(const std::string& folder, const TextStoreInfo& info) {
  const std::string path = captions_path(folder);
  file_ = open_safetensors(path);
  offsets_ = column<int64_t>(*file_, "offsets", Dtype::kI64, info.num_samples + 1, path);
  entries = column<int64_t>(*file_, "entry_of_caption", Dtype::kI64, -1, path);
  const auto num_captions = static_cast<int64_t>(entries.size());
  weights = column<float>(*file_, "weight", Dtype::kF32, num_captions, path);
  kinds = column<uint8_t>(*file_, "kind", Dtype::kU8, num_captions, path);
  text_offsets = column<int64_t>(*file_, "text_offsets", Dtype::kI64, info.num_entries + 1, path);
  const auto text = column<uint8_t>(*file_, "text_bytes", Dtype::kU8, -1, path);
  text_ = reinterpret_cast<const char*>(text.data());
  check_offsets(offsets_, num_captions, "offsets", path);
  check_offsets(text_offsets, static_cast<int64_t>(text.size()), "text_offsets", path);
  for (int64_t sample = 0; sample < info.num_samples; ++sample)
    if (captions(sample).count == 0) fail("text store", "sample {} of {} has no caption", sample, path);
  for (const int64_t entry : entries)
    if (entry < 0 || entry >= info.num_entries)
      fail("text store", "entry {} of {} does not exist", entry, path);
  for (const uint8_t kind : kinds)
    if (kind >= info.kinds.size()) fail("text store", "kind {} of {} has no name", kind, path);
  for (const float weight : weights)
    if (!(weight >= 0)) fail("text store", "expected weights of at least 0, got {} ({})", weight, path);
}

void write_captions_file(const std::string& folder, const CaptionTable& table) {
  std::vector<int64_t> text_offsets = {0};
  std::string text;
  for (int64_t entry = 0; entry < table.num_entries(); ++entry) {
    text += table.text(entry);
    text_offsets.push_back(static_cast<int64_t>(text.size()));
  }
  write_safetensors(captions_path(folder),
                    {named_column("offsets", Dtype::kI64, table.offsets()),
                     named_column("entry_of_caption", Dtype::kI64, table.entries()),
                     named_column("text_offsets", Dtype::kI64, text_offsets),
                     named_column("weight", Dtype::kF32, table.weights()),
                     named_column("kind", Dtype::kU8, table.kinds()),
                     {"text_bytes", view_of(Dtype::kU8, {static_cast<int64_t>(text.size())},
                                            std::as_bytes(std::span(text.data(), text.size())))}});
}

FeaturesFile::FeaturesFile(const std::string& folder, const TextStoreInfo& info, int64_t shard)
    : first_reads_(shard_entries(info, shard).count) {
  const std::string path = features_path(folder, shard);
  file_ = open_safetensors(path);
  const auto& metadata = file_->metadata();
  if (const auto identity = metadata.find(kIdentity);
      identity == metadata.end() || identity->second != identity_of(info))
    fail("text store", "{} belongs to other captions or another encoder", path);
  if (const auto count = metadata.find(kTruncated); count != metadata.end())
    std::from_chars(count->second.data(), count->second.data() + count->second.size(), num_truncated_);
  const auto found = file_->tensors().find("features");
  if (found == file_->tensors().end() || found->second.dtype != info.dtype ||
      found->second.shape.size() != 2 || found->second.shape[1] != info.width)
    fail("text store", "expected features (rows, {}) of {} in {}", info.width, dtype_name(info.dtype), path);
  features_ = found->second.bytes;
  row_bytes_ = info.width * static_cast<int64_t>(dtype_size(info.dtype));
  row_offsets_ =
      column<int64_t>(*file_, "row_offsets", Dtype::kI64, shard_entries(info, shard).count + 1, path);
  check_offsets(row_offsets_, found->second.shape[0], "row_offsets", path);
  if (file_->tensors().contains(kEntryChecksums))
    checksums_ =
        column<int64_t>(*file_, kEntryChecksums, Dtype::kI64, shard_entries(info, shard).count, path);
  for (size_t i = 1; i < row_offsets_.size(); ++i)
    if (const int64_t rows = row_offsets_[i] - row_offsets_[i - 1]; rows > info.max_tokens)
      fail("text store", "a caption of {} has {} rows, expected {} at most", path, rows, info.max_tokens);
}

std::string FeaturesFile::columns_xxh3() const {
  return kiln::columns_xxh3({std::as_bytes(row_offsets_), std::as_bytes(checksums_)});
}

void write_features_file(const std::string& folder, const TextStoreInfo& info, int64_t shard,
                         std::span<const int64_t> rows_of_entry, std::span<const std::byte> features,
                         int64_t num_truncated) {
  std::vector<int64_t> offsets = {0}, checksums;
  const int64_t row_bytes = info.width * static_cast<int64_t>(dtype_size(info.dtype));
  for (const int64_t rows : rows_of_entry) {
    checksums.push_back(
        static_cast<int64_t>(xxh3(features.subspan(offsets.back() * row_bytes, rows * row_bytes))));
    offsets.push_back(offsets.back() + rows);
  }
  write_safetensors(features_path(folder, shard),
                    {named_column("row_offsets", Dtype::kI64, offsets),
                     named_column(kEntryChecksums, Dtype::kI64, checksums),
                     {"features", view_of(info.dtype, {offsets.back(), info.width}, features)}},
                    {{kIdentity, identity_of(info)}, {kTruncated, std::to_string(num_truncated)}});
}

}  // namespace kiln
