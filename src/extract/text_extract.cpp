#include "extract/text_extract.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>
#include <unordered_map>

#include "core/aten.h"
#include "core/error.h"
#include "core/json_config.h"
#include "core/progress_line.h"
#include "core/stop_signal.h"
#include "core/tensors.h"
#include "data/store/feature_store.h"
#include "data/text_store/text_store_writer.h"
#include "models/text/text_registry.h"
#include "parallel/cpu_share.h"
#include "parallel/machine.h"
#include "parallel/ranks/agreement.h"
#include "text/tokenizers/tokenizer.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMostEntriesPerShard = 4096, kLeastEntriesPerShard = 32;
constexpr int64_t kMostShardBytes = int64_t{512} << 20;  // if every caption were of the greatest length
constexpr int64_t kManyTokens = 300;  // of encoders that take any number: PixArt-Sigma's and Sana's length
constexpr int64_t kMostTokens = 1 << 16;

// What sentence-transformers cuts at, where its file says so.
std::optional<int64_t> sentence_length(const fs::path& folder) {
  const fs::path path = folder / "sentence_bert_config.json";
  if (!fs::exists(path)) return std::nullopt;
  std::ifstream file(path);
  const auto config = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!config.is_object()) fail("text", "{} is no JSON object", path.string());
  return JsonConfig("text", config).positive("max_seq_length", kManyTokens);
}

int64_t max_tokens_of(const TextExtractOptions& options, const TextEncoderShape& shape,
                      const text::Tokenizer& tokenizer) {
  const int64_t possible = shape.max_tokens > 0 ? shape.max_tokens : kMostTokens;
  if (options.max_tokens != 0) {
    if (options.max_tokens < 1 || options.max_tokens > possible)
      fail("extract", "--text-max-tokens: expected 1 to {} for {}, got {}", possible, shape.family,
           options.max_tokens);
    return options.max_tokens;
  }
  const int64_t usual = shape.max_tokens > 0 ? shape.max_tokens : kManyTokens;
  return std::min(
      {usual, sentence_length(options.encoder).value_or(usual), tokenizer.max_length().value_or(usual)});
}

// Captions of the samples of a store, in their order.
CaptionTable collect_captions(const ImageDataset& dataset, const std::string& data, const FeatureStore& store,
                              const CaptionOptions& options) {
  std::unordered_map<std::string, int64_t> index_by_name;
  for (size_t i = 0; i < dataset.records().size(); ++i)
    index_by_name.emplace(dataset.records()[i].name, static_cast<int64_t>(i));
  CaptionTable table;
  for (int64_t sample = 0; sample < store.size(); ++sample) {
    const std::string name = store.sample_name(sample);
    const auto found = index_by_name.find(name);
    if (found == index_by_name.end())
      fail("extract", "sample {} of the store is not in {}: its captions cannot be read", name, data);
    table.add_sample(name, captions_of(dataset, found->second, options));
  }
  if (table.num_entries() == 1)
    fail("extract",
         "none of the {} samples in {} has a caption: expected metadata.jsonl with text, .txt beside the "
         "pictures or in "
         "the tars, or choose --captions png-text or file-names",
         store.size(), data);
  return table;
}

class TextExtraction {
 public:
  TextExtraction(const TextExtractOptions& options, const std::string& data, const std::string& store,
                 const std::string& compute_dtype, const std::string& device, ProcessGroup& group)
      : options_(options),
        group_(group),
        device_(parse_device(device, group.ranks().local_rank)),
        tokenizer_(text::load_tokenizer(options.encoder)),
        store_(FeatureStore::open(store)),
        table_(collect_captions(*ImageDataset::open(data), data, *store_, options.captions)) {
    apply(ComputeSettings{.device = device_, .cpu_share = cpu_share(group)});
    loaded_ =
        load_text_encoder(options.encoder, device_, parse_compute_dtype(compute_dtype, "--compute-dtype"));
    const TextEncoderShape& shape = loaded_.encoder->shape();
    if (tokenizer_->vocabulary_size() > shape.vocabulary_size)
      fail("extract", "the tokenizer of {} has {} tokens, its encoder {}: they do not belong together",
           options.encoder, tokenizer_->vocabulary_size(), shape.vocabulary_size);
    folder_ = text_store_folder(store, options.name.empty() ? shape.family : options.name);
    info_ = make_info(shape, compute_dtype);
  }

  void run() {
    std::unique_ptr<TextStoreWriter> writer;
    agree(group_, "the text store's folder", [&] {
      if (group_.rank() == 0) writer = std::make_unique<TextStoreWriter>(folder_, info_, table_);
    });
    if (!writer) writer = std::make_unique<TextStoreWriter>(folder_, info_, table_);
    if (writer->is_complete()) {
      if (group_.rank() == 0)
        fmt::print("{} is complete with {} captions: nothing to do\n", folder_, table_.num_entries());
      return;
    }
    const bool stopped = !write_shards(*writer);
    if (group_.sum({stopped ? 1.0 : 0.0}, "the end of the text extraction").front() > 0) {
      if (group_.rank() == 0) fmt::print(stderr, "stopped: the same command continues\n");
      return;
    }
    agree(group_, "finishing the text store", [&] {
      if (group_.rank() == 0) writer->finish(table_);
    });
    if (group_.rank() == 0) report(writer->info());
  }

 private:
  TextStoreInfo make_info(const TextEncoderShape& shape, const std::string& compute_dtype) const {
    TextStoreInfo info;
    info.encoder = shape.family;
    info.encoder_fingerprint = loaded_.fingerprint;
    info.tokenizer_fingerprint = tokenizer_->fingerprint();
    info.encoder_path = fs::absolute(options_.encoder).lexically_normal().string();
    info.width = shape.width;
    info.max_tokens = max_tokens_of(options_, shape, *tokenizer_);
    info.padded = shape.users_see_padding;
    info.dtype = from_scalar_type(
        options_.dtype.empty() ? shape.storage_dtype : parse_compute_dtype(options_.dtype, "--text-dtype"));
    info.prefix = options_.captions.prefix;
    info.suffix = options_.captions.suffix;
    info.compute_dtype = compute_dtype;
    const int64_t entry_bytes = info.max_tokens * info.width * static_cast<int64_t>(dtype_size(info.dtype));
    info.entries_per_shard =
        std::clamp(kMostShardBytes / entry_bytes, kLeastEntriesPerShard, kMostEntriesPerShard);
    return info;
  }

  // False when a signal ended it.
  bool write_shards(TextStoreWriter& writer) {
    const TextStoreInfo& info = writer.info();
    int64_t done = 0;
    for (int64_t shard = 0; shard < info.num_shards(); ++shard)
      if (writer.has_shard(shard)) done += shard_entries(info, shard).count;
    ProgressLine progress(done, info.num_entries, /*is_shown=*/group_.rank() == 0);
    for (int64_t shard = group_.rank(); shard < info.num_shards(); shard += group_.world_size()) {
      if (stop_.requested()) return false;
      if (writer.has_shard(shard)) continue;
      write_shard(writer, shard);
      done += shard_entries(info, shard).count * group_.world_size();
      progress.update(std::min(done, info.num_entries), 0);
    }
    progress.finish(info.num_entries, 0);
    return true;
  }

  // Captions of similar length are encoded together; the batches are those of the shard alone.
  void write_shard(TextStoreWriter& writer, int64_t shard) {
    const EntryRange range = shard_entries(writer.info(), shard);
    std::vector<text::TokenIds> ids(range.count);
    int64_t num_truncated = 0;
    for (int64_t i = 0; i < range.count; ++i) ids[i] = encode(table_.text(range.first + i), num_truncated);
    std::vector<int64_t> by_length(range.count);
    std::iota(by_length.begin(), by_length.end(), 0);
    std::stable_sort(by_length.begin(), by_length.end(),
                     [&](int64_t a, int64_t b) { return ids[a].size() < ids[b].size(); });

    std::vector<at::Tensor> rows(range.count);
    const int64_t batch = options_.batch > 0 ? options_.batch : device_.is_cuda() ? 256 : 32;
    for (int64_t first = 0; first < range.count; first += batch) {
      const int64_t last = std::min(first + batch, range.count);
      TokenRows tokens{.host_offsets = {0}};
      text::TokenIds all;
      for (int64_t i = first; i < last; ++i) {
        all.insert(all.end(), ids[by_length[i]].begin(), ids[by_length[i]].end());
        tokens.host_offsets.push_back(static_cast<int64_t>(all.size()));
      }
      tokens.ids = at::tensor(all, at::kLong).to(device_);
      const at::Tensor features = loaded_.encoder->encode(tokens)
                                      .last_hidden.to(at::kCPU)
                                      .to(to_scalar_type(info_.dtype))
                                      .contiguous();
      for (int64_t i = first; i < last; ++i) {
        const int64_t begin = tokens.host_offsets[i - first], end = tokens.host_offsets[i - first + 1];
        rows[by_length[i]] = features.narrow(0, begin, end - begin);
        if (!at::isfinite(rows[by_length[i]]).all().item<bool>()) refuse_infinite(range.first + by_length[i]);
      }
    }
    std::vector<int64_t> rows_of_entry;
    for (const at::Tensor& part : rows) rows_of_entry.push_back(part.size(0));
    const at::Tensor features = at::cat(rows).contiguous();
    writer.write_shard(shard, rows_of_entry,
                       {static_cast<const std::byte*>(features.const_data_ptr()), features.nbytes()},
                       num_truncated);
  }

  text::TokenIds encode(const std::string& caption, int64_t& num_truncated) const {
    text::TokenIds ids = tokenizer_->encode(caption, {.max_length = info_.max_tokens});
    if (static_cast<int64_t>(ids.size()) == info_.max_tokens &&
        static_cast<int64_t>(tokenizer_->encode(caption).size()) > info_.max_tokens)
      ++num_truncated;
    if (info_.padded) ids.resize(info_.max_tokens, tokenizer_->pad_id());
    return ids;
  }

  [[noreturn]] void refuse_infinite(int64_t entry) const {
    fail("extract",
         "the features of caption {:?} are not finite in {}: choose another --text-dtype or --compute-dtype",
         table_.text(entry), dtype_name(info_.dtype));
  }

  void report(const TextStoreInfo& info) const {
    fmt::print("{} captions, {} of them different, for {} samples in {}\n", table_.entries().size(),
               info.num_entries - 1, info.num_samples, folder_);
    if (info.num_without_caption > 0)
      fmt::print("{} samples have no caption: they train as with a dropped one\n", info.num_without_caption);
    if (info.num_truncated > 0)
      fmt::print("{} captions were longer than {} tokens and were cut\n", info.num_truncated,
                 info.max_tokens);
  }

  const at::NoGradGuard no_grad_;
  const StopSignal stop_;
  const TextExtractOptions& options_;
  ProcessGroup& group_;
  const at::Device device_;
  const std::unique_ptr<text::Tokenizer> tokenizer_;
  const std::shared_ptr<FeatureStore> store_;
  const CaptionTable table_;
  LoadedTextEncoder loaded_;
  std::string folder_;
  TextStoreInfo info_;
};

}  // namespace

void extract_text(const TextExtractOptions& options, const std::string& data, const std::string& store,
                  const std::string& compute_dtype, const std::string& device, ProcessGroup& group) {
  check_caption_options(options.captions);
  TextExtraction(options, data, store, compute_dtype, device, group).run();
}

}  // namespace kiln
