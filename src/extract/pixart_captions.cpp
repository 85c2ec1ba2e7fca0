#include "extract/extract.h"

#include <filesystem>

#include "core/aten.h"
#include "core/error.h"
#include "core/tensors.h"
#include "core/text/progress_line.h"
#include "data/images/npz.h"
#include "data/store/feature_store.h"
#include "data/store/other_caches.h"
#include "data/text_store/text_store_writer.h"
#include "models/text/caption_encoder.h"
#include "parallel/machine.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kEntriesPerShard = 256;
constexpr const char* kMask = "attention_mask";
constexpr const char* kFeatures = "caption_feature";

// Returns the indices of the rows that `mask` keeps.
at::Tensor kept_rows(const NpyArray& mask, int64_t num_rows, const std::string& path) {
  const auto num_values = static_cast<int64_t>(mask.bytes.size() / dtype_size(mask.dtype));
  if (num_values != num_rows)
    fail("store import", "expected {} of {} rows, got {} ({})", kMask, num_rows, num_values, path);
  return at::from_blob(const_cast<std::byte*>(mask.bytes.data()), {num_values}, to_scalar_type(mask.dtype))
      .nonzero()
      .flatten();
}

struct PaddedCaption {
  at::Tensor rows;        // (rows, D) f16, without padding
  int64_t padded_to = 0;  // rows
};

PaddedCaption read_caption(const std::string& path) {
  const std::map<std::string, NpyArray> arrays = read_npz(path);
  const auto found = arrays.find(kFeatures);
  if (found == arrays.end()) fail("store import", "expected an array {}, got none ({})", kFeatures, path);
  std::vector<int64_t> shape = found->second.shape;
  if (shape.size() == 3 && shape.front() == 1) shape.erase(shape.begin());
  if (shape.size() != 2 || shape[0] < 1 || shape[1] < 1)
    fail("store import", "expected {} of shape (1, rows, width) ({})", kFeatures, path);
  std::vector<float> values = float_values(found->second, path);
  at::Tensor rows = at::from_blob(values.data(), shape).to(at::kHalf);
  if (const auto mask = arrays.find(kMask); mask != arrays.end())
    rows = rows.index_select(0, kept_rows(mask->second, shape[0], path));
  if (rows.size(0) == 0) fail("store import", "expected a caption of at least one row, got none ({})", path);
  if (!at::isfinite(rows).all().item<bool>())
    fail("store import", "{} holds values that are not finite in F16 ({})", kFeatures, path);
  return {.rows = rows, .padded_to = shape[0]};
}

class CaptionImport {
 public:
  CaptionImport(const std::string& store, const PixartCaptionOptions& options)
      : options_(options), store_(FeatureStore::open(store)), list_(options.data_info) {
    find_captions();
    const PaddedCaption first = read_caption(files_[1]);
    info_.encoder = "t5_encoder";
    info_.width = first.rows.size(1);
    info_.max_tokens = first.padded_to;
    info_.dtype = Dtype::kF16;
    info_.entries_per_shard = kEntriesPerShard;
    load_encoder();
    TextStoreWriter writer(text_store_folder(store, options.name), info_, table_);
    if (!writer.is_complete()) write(writer);
    fmt::print("{}: {} captions of {} samples\n", text_store_folder(store, options.name),
               table_.num_entries() - 1, table_.num_samples());
  }

 private:
  // The caption of the latents a/b.npy is in a/b.npz.
  void find_captions() {
    files_.emplace_back();  // of the empty caption
    for (int64_t sample = 0; sample < store_->size(); ++sample) {
      const std::string name = store_->sample_name(sample);
      const fs::path file = (fs::path(options_.features) / name).replace_extension(".npz");
      if (!fs::exists(file))
        fail("store import", "the caption of {} is missing: expected {}", name, file.string());
      const std::string prompt = list_.of_latents(name).prompt;
      const Caption caption{.text = prompt.empty() ? name : prompt, .kind = "pixart"};
      table_.add_sample(name, {&caption, 1});
      if (static_cast<size_t>(table_.num_entries()) > files_.size()) files_.push_back(file.string());
    }
  }

  void load_encoder() {
    empty_ = at::empty({0, info_.width}, at::kHalf);
    if (options_.text_encoder.empty()) return;
    const CaptionEncoder encoder(
        options_.text_encoder, info_.max_tokens, at::kCPU, at::kBFloat16,
        {.bytes = usable_bytes(at::kCPU, /*num_processes=*/1), .text = "what is free"});
    if (encoder.shape().width != info_.width)
      fail("store import", "{} gives features of {} channels, the captions have {}", options_.text_encoder,
           encoder.shape().width, info_.width);
    info_.encoder = encoder.shape().family;
    info_.encoder_fingerprint = encoder.encoder_fingerprint();
    info_.tokenizer_fingerprint = encoder.tokenizer_fingerprint();
    info_.encoder_path = fs::absolute(options_.text_encoder).lexically_normal().string();
    const std::vector<std::string> empty = {""};
    empty_ = encoder.encode(empty, 1).rows.front().to(at::kHalf);
  }

  void write(TextStoreWriter& writer) {
    const TextStoreInfo& info = writer.info();
    ShardProgress progress("captions imported", info.num_entries);
    for (int64_t shard = 0; shard < info.num_shards(); ++shard) {
      const EntryRange range = shard_entries(info, shard);
      if (!writer.has_shard(shard)) write_shard(writer, shard, range);
      progress.update(range.first + range.count);
    }
    writer.finish(table_);
  }

  at::Tensor caption_rows(const std::string& file) const {
    const PaddedCaption caption = read_caption(file);
    if (caption.rows.size(1) != info_.width || caption.padded_to > info_.max_tokens)
      fail("store import", "expected at most {} rows of {} channels as in {}, got {} of {} ({})",
           info_.max_tokens, info_.width, files_[1], caption.padded_to, caption.rows.size(1), file);
    return caption.rows;
  }

  void write_shard(TextStoreWriter& writer, int64_t shard, const EntryRange& range) const {
    std::vector<at::Tensor> rows;
    std::vector<int64_t> counts;
    for (int64_t entry = range.first; entry < range.first + range.count; ++entry) {
      rows.push_back(entry > 0 ? caption_rows(files_[static_cast<size_t>(entry)]) : empty_);
      counts.push_back(rows.back().size(0));
    }
    const at::Tensor features = at::cat(rows).contiguous();
    writer.write_shard(shard, counts,
                       {static_cast<const std::byte*>(features.const_data_ptr()), features.nbytes()},
                       /*num_truncated=*/0);
  }

  const PixartCaptionOptions& options_;
  const std::shared_ptr<FeatureStore> store_;
  const PixartList list_;
  CaptionTable table_;
  std::vector<std::string> files_;  // of each entry
  TextStoreInfo info_;
  at::Tensor empty_;
};

}  // namespace

void import_pixart_captions(const std::string& store, const PixartCaptionOptions& options) {
  CaptionImport(store, options);
}

}  // namespace kiln
