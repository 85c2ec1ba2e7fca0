#include "extract/extract.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <unordered_map>

#include "core/aten.h"
#include "core/error.h"
#include "core/stop_signal.h"
#include "core/tensors.h"
#include "core/text/progress_line.h"
#include "core/units.h"
#include "data/store/feature_store.h"
#include "data/text_store/text_store.h"
#include "data/text_store/text_store_writer.h"
#include "extract/settings.h"
#include "models/text/caption_encoder.h"
#include "parallel/cpu_share.h"
#include "parallel/machine.h"
#include "parallel/ranks/agreement.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMostEntriesPerShard = 4096, kLeastEntriesPerShard = 32;
constexpr int64_t kMostShardBytes = int64_t{512} << 20;  // if every caption had the greatest length

// Returns the captions of the samples of a store, in their order.
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
  require_captions(table, data);
  return table;
}

// Called before the captions are read, so that an error in the encoder's folder comes at once.
CaptionEncoder load_encoder(const ExtractOptions& options, at::Device device, ProcessGroup& group) {
  apply(ComputeSettings{.device = device, .threads = options.threads, .cpu_share = cpu_share(group)});
  return {
      options.text.encoder,
      options.text.max_tokens,
      device,
      parse_compute_dtype(options.compute_dtype, "--compute-dtype"),
      encoder_room(options.text, device,
                   {.bytes = usable_bytes(device, group.ranks().local_world_size), .text = "what is free"}),
      EncoderUse::kEncode,
      options.text.instruction};
}

class TextExtraction {
 public:
  TextExtraction(const ExtractOptions& options, const ImageDataset& pictures, const std::string& store,
                 ProcessGroup& group, const std::string& grown)
      : options_(options.text),
        group_(group),
        device_(parse_device(options.device, group.ranks().local_rank)),
        encoder_(load_encoder(options, device_, group)),
        store_(FeatureStore::open(store)),
        table_(collect_captions(pictures, options.data, *store_, options_)) {
    batch_ = encoder_.batch_within_room(options_.batch, device_.is_cuda() ? 256 : 32);
    const std::string name = options_.name.empty() ? encoder_.shape().family : options_.name;
    folder_ = text_store_folder(store, name);
    info_ = make_info(options.compute_dtype);
    if (!grown.empty()) require_same_captions(grown, name);
  }

  void run() {
    std::unique_ptr<TextStoreWriter> writer;
    agree(group_, "the text store's folder", [&] {
      if (group_.rank() == 0) writer = std::make_unique<TextStoreWriter>(folder_, info_, table_);
    });
    if (!writer) writer = std::make_unique<TextStoreWriter>(folder_, info_, table_, /*joins=*/true);
    if (writer->is_complete()) {
      if (group_.rank() == 0)
        fmt::print("{} is complete with {} captions: nothing to do\n", folder_, table_.num_entries());
      return;
    }
    if (encoder_.is_streamed() && group_.rank() == 0) say_streaming(*writer);
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
  TextStoreInfo make_info(const std::string& compute_dtype) const {
    TextStoreInfo info = describe_text(encoder_, options_, compute_dtype);
    const int64_t entry_bytes = info.max_tokens * info.width * static_cast<int64_t>(dtype_size(info.dtype));
    info.entries_per_shard =
        std::clamp(kMostShardBytes / entry_bytes, kLeastEntriesPerShard, kMostEntriesPerShard);
    return info;
  }

  void say_streaming(const TextStoreWriter& writer) const {
    int64_t passes = 0;
    for (int64_t shard = 0; shard < writer.info().num_shards(); ++shard) passes += !writer.has_shard(shard);
    fmt::print(stderr, "{}; {} passes or more, {} of reading\n", encoder_.streaming_text(batch_), passes,
               duration_text(static_cast<double>(passes) * encoder_.seconds_of_pass()));
  }

  // Throws Error if `grown` has no captions of this name, or captions of another encoder.
  void require_same_captions(const std::string& grown, const std::string& name) const {
    const std::string folder = text_store_folder(grown, name);
    if (!fs::exists(fs::path(folder) / "text.json"))
      fail("extract",
           "--append: {} has no text-{}: extract the captions of its first samples too, without --append",
           grown, name);
    require_same_encoder(read_text_store_info(folder), folder, info_, folder_);
  }

  // Returns false when a signal ended it.
  bool write_shards(TextStoreWriter& writer) {
    const TextStoreInfo& info = writer.info();
    int64_t done = 0;
    for (int64_t shard = 0; shard < info.num_shards(); ++shard)
      if (writer.has_shard(shard)) done += shard_entries(info, shard).count;
    ProgressLine progress(done, info.num_entries, /*is_shown=*/group_.rank() == 0, "captions");
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

  // Encodes and writes one shard. No batch has captions of two shards.
  void write_shard(TextStoreWriter& writer, int64_t shard) {
    const EntryRange range = shard_entries(writer.info(), shard);
    std::vector<std::string> captions;
    for (int64_t i = 0; i < range.count; ++i) captions.emplace_back(table_.text(range.first + i));
    const CaptionEncoder::Encoded encoded = encoder_.encode(captions, batch_, to_scalar_type(info_.dtype));
    std::vector<int64_t> rows_of_entry;
    for (int64_t i = 0; i < range.count; ++i) {
      const at::Tensor& rows = encoded.rows[i];
      if (!at::isfinite(rows).all().item<bool>()) refuse_infinite(range.first + i);
      rows_of_entry.push_back(rows.size(0));
    }
    const at::Tensor features = at::cat(encoded.rows).contiguous();
    writer.write_shard(shard, rows_of_entry,
                       {static_cast<const std::byte*>(features.const_data_ptr()), features.nbytes()},
                       encoded.num_truncated);
  }

  [[noreturn]] void refuse_infinite(int64_t entry) const {
    fail("extract",
         "the features of caption {:?} are not finite in {}: choose another --text-dtype or --compute-dtype",
         table_.text(entry), dtype_name(info_.dtype));
  }

  void report(const TextStoreInfo& info) const {
    fmt::print("{} captions, {} of them different, for {} samples in {}\n",
               static_cast<int64_t>(table_.entries().size()) - info.num_without_caption, info.num_entries - 1,
               info.num_samples, folder_);
    if (info.num_without_caption > 0)
      fmt::print("{} samples have no caption and train as if it were dropped\n", info.num_without_caption);
    if (info.num_truncated > 0)
      fmt::print("{} captions were longer than {} tokens and were cut\n", info.num_truncated,
                 info.max_tokens);
  }

  const at::NoGradGuard no_grad_;
  const StopSignal stop_;
  const CaptionEncodingOptions& options_;
  ProcessGroup& group_;
  const at::Device device_;
  const CaptionEncoder encoder_;
  const std::shared_ptr<FeatureStore> store_;
  const CaptionTable table_;
  int64_t batch_ = 0;
  std::string folder_;
  TextStoreInfo info_;
};

}  // namespace

void check_text_encoder(const CaptionEncodingOptions& options) {
  check_caption_options(options);
  CaptionEncoder(options.encoder, options.max_tokens, at::kCPU, at::kFloat, {}, EncoderUse::kCheck,
                 options.instruction);
}

void extract_text(const ExtractOptions& options, const ImageDataset& pictures, const std::string& store,
                  ProcessGroup& group, const std::string& grown) {
  check_caption_options(options.text);
  TextExtraction(options, pictures, store, group, grown).run();
}

}  // namespace kiln
