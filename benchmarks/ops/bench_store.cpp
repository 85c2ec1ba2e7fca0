// The feature store and the loader, one thread, warm page cache: 4 x 32 x 32 latents, batches of 256.
// Needed: 200,000 samples/s as bf16 means, 20,000 samples/s with every draw.
#include <benchmark/benchmark.h>
#include <unistd.h>

#include <filesystem>
#include <map>

#include "core/philox.h"
#include "data/loader/batches.h"
#include "data/store/sample_order.h"

namespace {

using kiln::Dtype;
using kiln::FeatureStore;
using kiln::FeatureStoreWriter;
using kiln::StoreInfo;

constexpr int64_t kNumSamples = 8192, kBatch = 256, kLatentSize = 4 * 32 * 32;

// Stores in a temporary folder, written at first use, removed at the end.
class Stores {
 public:
  ~Stores() {
    opened_.clear();
    if (!folder_.empty()) std::filesystem::remove_all(folder_);
  }
  std::shared_ptr<FeatureStore> open(Dtype dtype) {
    auto& store = opened_[dtype];
    if (!store) store = FeatureStore::open(write(dtype));
    return store;
  }

 private:
  std::string write(Dtype dtype) {
    if (folder_.empty()) {
      std::string pattern = (std::filesystem::temp_directory_path() / "kiln-bench-XXXXXX").string();
      folder_ = ::mkdtemp(pattern.data());
    }
    const std::string folder = (folder_ / kiln::dtype_name(dtype)).string();
    StoreInfo info;
    info.autoencoder = "autoencoder_kl";
    info.scaling_factor = 0.18215;
    info.channels = 4;
    info.lanes = {{.height = 32, .width = 32}};
    info.image_size = 256;
    info.dtype = dtype;
    for (int i = 0; i < 1000; ++i) info.class_names.push_back(std::to_string(i));
    const auto writer = FeatureStoreWriter::open(folder, info);
    FeatureStoreWriter::Sample sample;
    sample.mean.resize(kLatentSize);
    sample.logvar.resize(kLatentSize);
    for (int64_t i = 0; i < kNumSamples; ++i) {
      sample.name = std::to_string(i);
      sample.label = i % 1000;
      kiln::philox_normal(1, kiln::Draw::kNoise, i, sample.mean);
      kiln::philox_normal(1, kiln::Draw::kPosterior, i, sample.logvar);
      writer->add(sample);
    }
    writer->finish();
    return folder;
  }

  std::filesystem::path folder_;
  std::map<Dtype, std::shared_ptr<FeatureStore>> opened_;
};

Stores& stores() {
  static Stores stores;
  return stores;
}

// Shuffled means as one bf16 batch, without draws.
void bf16_means(benchmark::State& state, Dtype dtype) {
  const auto store = stores().open(dtype);
  std::vector<int64_t> ids(kBatch);
  std::vector<uint16_t> out(kBatch * kLatentSize);
  const kiln::SampleOrder order(1, store->info().sample_lanes(), kBatch);
  int64_t position = 0;
  for (auto _ : state) {
    for (auto& id : ids) id = order.sample_at(position++);
    store->read_mean_bf16(ids, out);
    benchmark::DoNotOptimize(out.data());
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * kBatch);
}
BENCHMARK_CAPTURE(bf16_means, from_f32, Dtype::kF32)->UseRealTime();
BENCHMARK_CAPTURE(bf16_means, from_bf16, Dtype::kBF16)->UseRealTime();

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

}  // namespace
