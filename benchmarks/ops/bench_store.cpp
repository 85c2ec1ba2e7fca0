// The feature store, the text store and the loader, one thread, warm page cache: 4 x 32 x 32 latents,
// captions of 100 x 384 in fp16, batches of 256. Needed: 200,000 samples/s as means, 20,000 samples/s
// with every draw, 50,000 captions/s.
#include <benchmark/benchmark.h>
#include <unistd.h>

#include <filesystem>
#include <map>

#include "core/philox.h"
#include "data/loader/batches.h"
#include "data/store/sample_order.h"
#include "data/text_store/text_store_writer.h"

namespace {

using kiln::Dtype;
using kiln::FeatureStore;
using kiln::FeatureStoreWriter;
using kiln::StoreInfo;
using kiln::TextStore;

constexpr int64_t kNumSamples = 8192, kBatch = 256, kLatentSize = 4 * 32 * 32;
constexpr int64_t kNumCaptions = 4096, kCaptionRows = 100, kTextWidth = 384;

// Stores in a temporary folder, written at first use, removed at the end.
class Stores {
 public:
  ~Stores() {
    opened_.clear();
    captioned_ = {};
    if (!folder_.empty()) std::filesystem::remove_all(folder_);
  }
  // Of the latents that come with captions one channel of 8 x 8: nearly all the work is the captions.
  struct Captioned {
    std::shared_ptr<FeatureStore> latents;
    std::shared_ptr<const TextStore> captions;
  };
  Captioned captioned() {
    if (!captioned_.latents) {
      const std::string latents = write_latents("captioned", Dtype::kBF16, kNumCaptions, 1, 8);
      const std::string captions = kiln::text_store_folder(latents, "bert");
      write_captions(captions);
      captioned_ = {FeatureStore::open(latents), TextStore::open(captions)};
    }
    return captioned_;
  }
  std::shared_ptr<FeatureStore> open(Dtype dtype) {
    auto& store = opened_[dtype];
    if (!store) store = FeatureStore::open(write_latents(kiln::dtype_name(dtype), dtype, kNumSamples, 4, 32));
    return store;
  }

 private:
  std::string write_latents(std::string_view name, Dtype dtype, int64_t count, int64_t channels,
                            int64_t side) {
    if (folder_.empty()) {
      std::string pattern = (std::filesystem::temp_directory_path() / "kiln-bench-XXXXXX").string();
      folder_ = ::mkdtemp(pattern.data());
    }
    const std::string folder = (folder_ / name).string();
    StoreInfo info;
    info.autoencoder = "autoencoder_kl";
    info.scaling_factor = 0.18215;
    info.channels = channels;
    info.lanes = {{.height = side, .width = side}};
    info.image_size = 256;
    info.dtype = dtype;
    for (int i = 0; i < 1000; ++i) info.class_names.push_back(std::to_string(i));
    const auto writer = FeatureStoreWriter::open(folder, info);
    FeatureStoreWriter::Sample sample;
    sample.mean.resize(static_cast<size_t>(channels * side * side));
    sample.logvar.resize(sample.mean.size());
    for (int64_t i = 0; i < count; ++i) {
      sample.name = std::to_string(i);
      sample.label = i % 1000;
      kiln::philox_normal(1, kiln::Draw::kNoise, i, sample.mean);
      kiln::philox_normal(1, kiln::Draw::kPosterior, i, sample.logvar);
      writer->add(sample);
    }
    writer->finish();
    return folder;
  }

  static void write_captions(const std::string& folder) {
    kiln::CaptionTable table;
    for (int64_t i = 0; i < kNumCaptions; ++i)
      table.add_sample(std::to_string(i),
                       std::vector<kiln::Caption>{{.text = "caption " + std::to_string(i)}});
    kiln::TextStoreInfo info;
    info.encoder = "bert";
    info.encoder_fingerprint = "e";
    info.tokenizer_fingerprint = "t";
    info.width = kTextWidth;
    info.max_tokens = kCaptionRows;
    info.dtype = Dtype::kF16;
    info.compute_dtype = "f32";
    info.entries_per_shard = 1024;
    kiln::TextStoreWriter writer(folder, info, table);
    std::vector<uint16_t> features;
    for (int64_t shard = 0; shard < writer.info().num_shards(); ++shard) {
      const kiln::EntryRange range = kiln::shard_entries(writer.info(), shard);
      features.resize(static_cast<size_t>(range.count * kCaptionRows * kTextWidth));
      for (size_t i = 0; i < features.size(); ++i) features[i] = static_cast<uint16_t>(i % 0x3C00);
      writer.write_shard(shard, std::vector<int64_t>(static_cast<size_t>(range.count), kCaptionRows),
                         std::as_bytes(std::span(features)), /*num_truncated=*/0);
    }
    writer.finish(table);
  }

  std::filesystem::path folder_;
  std::map<Dtype, std::shared_ptr<FeatureStore>> opened_;
  Captioned captioned_;
};

Stores& stores() {
  static Stores stores;
  return stores;
}

// Shuffled means as one batch, without draws.
void means(benchmark::State& state, Dtype dtype) {
  const auto store = stores().open(dtype);
  std::vector<int64_t> ids(kBatch);
  std::vector<float> out(kBatch * kLatentSize);
  const kiln::SampleOrder order(1, store->info().sample_lanes(), kBatch);
  int64_t position = 0;
  for (auto _ : state) {
    for (auto& id : ids) id = order.sample_at(position++);
    store->read_mean(ids, {}, out);
    benchmark::DoNotOptimize(out.data());
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * kBatch);
}
BENCHMARK_CAPTURE(means, from_f32, Dtype::kF32)->UseRealTime();
BENCHMARK_CAPTURE(means, from_bf16, Dtype::kBF16)->UseRealTime();

// Whole batches by the loader with one worker thread: posterior, noise, timestep, label and flip drawn,
// scaled.
void whole_batches(benchmark::State& state, Dtype dtype) {
  kiln::BatchOptions options;
  options.seed = 1;
  options.global_batch = kBatch;
  options.class_dropout_prob = 0.1;
  options.null_class = 1000;
  const auto source = kiln::store_batches(stores().open(dtype), options);
  for (auto _ : state) benchmark::DoNotOptimize(source->next()->x_0.data());
  state.SetItemsProcessed(state.iterations() * kBatch);
}
BENCHMARK_CAPTURE(whole_batches, from_f32, Dtype::kF32)->UseRealTime();
BENCHMARK_CAPTURE(whole_batches, from_bf16, Dtype::kBF16)->UseRealTime();
BENCHMARK_CAPTURE(whole_batches, from_fp16, Dtype::kF16)->UseRealTime();

// Shuffled captions into whole batches by the loader.
void captions(benchmark::State& state) {
  kiln::BatchOptions options;
  options.seed = 1;
  options.global_batch = kBatch;
  options.num_threads = static_cast<int>(state.range(0));
  const Stores::Captioned captioned = stores().captioned();
  const auto source = kiln::store_batches(captioned.latents, options, captioned.captions);
  for (auto _ : state) benchmark::DoNotOptimize(source->next()->text_rows.data());
  state.SetItemsProcessed(state.iterations() * kBatch);
  state.SetBytesProcessed(state.iterations() * kBatch * kCaptionRows * kTextWidth * 2);
}
BENCHMARK(captions)->ArgName("threads")->Arg(1)->Arg(2)->UseRealTime();

}  // namespace
