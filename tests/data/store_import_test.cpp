// fast-DiT's and PixArt's feature folders become stores.
#include "data/store/store_import.h"

#include <cstring>

#include "data/store/store_report.h"
#include "data/test_store.h"

namespace kiln {
namespace {

// A version 1.0 .npy file, as numpy writes it.
template <class T>
void write_npy(const std::string& path, const std::string& descr, const std::string& shape,
               const std::vector<T>& values) {
  std::string header = "{'descr': '" + descr + "', 'fortran_order': False, 'shape': (" + shape + "), }";
  header.resize((10 + header.size() + 1 + 63) / 64 * 64 - 10 - 1, ' ');
  header += '\n';
  std::string file = std::string("\x93NUMPY\x01\x00", 8) + static_cast<char>(header.size() & 255) +
                     static_cast<char>(header.size() >> 8) + header;
  file.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  test::write_bytes(path, file);
}

class StoreImport : public testing::Test {
 protected:
  // Latents (1, 2, 2, 3) of value n + e / 16, labels n % 3.
  void write_fast_dit(int num_samples) {
    for (int n = 0; n < num_samples; ++n) {
      std::vector<float> values(12);
      for (int e = 0; e < 12; ++e) values[e] = static_cast<float>(n) + static_cast<float>(e) / 16;
      write_npy(file("x/toy_features/" + std::to_string(n) + ".npy"), "<f4", "1, 2, 2, 3", values);
      write_npy(file("x/toy_labels/" + std::to_string(n) + ".npy"), "<i8", "1,", std::vector<int64_t>{n % 3});
    }
    options_.features = file("x/toy_features");
    options_.labels = file("x/toy_labels");
    options_.out = file("store");
    options_.image_size = 16;
  }
  std::string message() const {
    return message_of([this] { import_store(options_); });
  }
  std::string file(const std::string& name) const { return folder_ / name; }

  StoreImportOptions options_;

 private:
  TempFolder folder_;
};

TEST_F(StoreImport, FastDitKeepsOrderValuesAndLabels) {
  write_fast_dit(12);  // 10.npy and 11.npy come after 9.npy, not after 1.npy
  import_store(options_);
  const auto store = FeatureStore::open(file("store"), /*verify=*/true);
  const StoreInfo& info = store->info();
  EXPECT_EQ(store->size(), 12);
  EXPECT_FALSE(info.has_logvar);
  EXPECT_TRUE(info.already_scaled);
  EXPECT_EQ(info.scaling_factor, 0.18215);
  EXPECT_EQ(info.image_size, 16);
  EXPECT_EQ(info.class_names, (std::vector<std::string>{"0", "1", "2"}));
  std::vector<float> values(12);
  for (int64_t n = 0; n < 12; ++n) {
    EXPECT_EQ(store->sample_name(n), std::to_string(n) + ".npy");
    EXPECT_EQ(store->label(n), n % 3);
    store->read_mean({&n, 1}, {}, values);
    EXPECT_EQ(values[5], static_cast<float>(n) + 5.0f / 16);
  }
}

TEST_F(StoreImport, FastDitFindsTheTwoFoldersInside) {
  write_fast_dit(3);
  options_.features = file("x");
  options_.labels.clear();
  options_.num_classes = 1000;
  import_store(options_);
  const auto store = FeatureStore::open(file("store"));
  EXPECT_EQ(store->label(2), 2);
  EXPECT_EQ(store->info().class_names.size(), 1000u);
}

TEST_F(StoreImport, UnlabelledAndHalfPrecision) {
  write_fast_dit(3);
  options_.labels.clear();
  options_.dtype = "bf16";
  import_store(options_);
  const auto store = FeatureStore::open(file("store"));
  EXPECT_TRUE(store->info().class_names.empty());
  EXPECT_EQ(store->info().dtype, Dtype::kBF16);
}

TEST_F(StoreImport, PixartHasMeanAndStandardDeviation) {
  for (int n = 0; n < 3; ++n) {
    std::vector<float> values(12);
    for (int e = 0; e < 6; ++e) values[e] = static_cast<float>(n - e);
    for (int e = 6; e < 12; ++e) values[e] = 0.5f / static_cast<float>(e);
    values[11] = 0;  // a certain element
    write_npy(file("p/sub/picture." + std::to_string(n) + ".npy"), "<f4", "4, 1, 3", values);
  }
  options_.from = "pixart";
  options_.features = file("p");
  options_.out = file("store");
  options_.image_size = 24;
  EXPECT_THAT(message(), HasSubstr("--scaling-factor is needed"));
  options_.scaling_factor = 0.13025;
  import_store(options_);
  const auto store = FeatureStore::open(file("store"), /*verify=*/true);
  const int64_t id = 1;
  std::vector<float> values(6);
  EXPECT_EQ(store->info().channels, 2);
  EXPECT_FALSE(store->info().already_scaled);
  EXPECT_EQ(store->info().scaling_factor, 0.13025);
  EXPECT_EQ(store->sample_name(id), "sub/picture.1.npy");
  store->read_mean({&id, 1}, {}, values);
  EXPECT_EQ(values[4], -3);
  store->read_logvar({&id, 1}, {}, values);
  EXPECT_NEAR(std::exp(0.5 * values[2]), 0.5 / 8, 1e-7);
  EXPECT_EQ(values[5], -30);
}

TEST_F(StoreImport, HalfAndDoubleArraysAreRead) {
  options_.features = file("h");
  options_.out = file("store");
  options_.image_size = 8;
  write_npy(file("h/0.npy"), "<f2", "1, 1, 1, 2", std::vector<uint16_t>{0x3c00, 0xc000});
  write_npy(file("h/1.npy"), "<f8", "1, 1, 1, 2", std::vector<double>{0.5, 4});
  import_store(options_);
  const auto store = FeatureStore::open(file("store"));
  std::vector<float> values(4);
  store->read_mean(std::vector<int64_t>{0, 1}, {}, values);
  EXPECT_EQ(values, (std::vector<float>{1, -2, 0.5, 4}));
}

TEST_F(StoreImport, AnInterruptedImportContinues) {
  write_fast_dit(6);
  test::write_bytes(file("x/toy_features/4.npy"), "broken");
  EXPECT_THAT(message(), HasSubstr("4.npy"));
  EXPECT_FALSE(read_store_info(file("store")).complete);
  write_fast_dit(6);  // repaired
  import_store(options_);
  EXPECT_EQ(FeatureStore::open(file("store"))->size(), 6);
  import_store(options_);  // again: nothing to do
  write_fast_dit(7);       // one more file: not the same import
  EXPECT_THAT(message(), HasSubstr("source num_files (6 there, 7 asked for)"));
}

TEST_F(StoreImport, OddFoldersAreRefusedByName) {
  write_fast_dit(3);
  std::filesystem::remove(file("x/toy_labels/1.npy"));
  EXPECT_THAT(message(), HasSubstr("1.npy has no label"));
  write_fast_dit(3);
  std::filesystem::remove(file("x/toy_features/2.npy"));
  EXPECT_THAT(message(), HasSubstr("label 2.npy has no features"));
  write_fast_dit(3);
  write_npy(file("x/toy_labels/1.npy"), "<f4", "1,", std::vector<float>{1});
  EXPECT_THAT(message(), HasSubstr("expected one integer label, got F32"));
  write_npy(file("x/toy_labels/1.npy"), "<i8", "1,", std::vector<int64_t>{-4});
  EXPECT_THAT(message(), HasSubstr("expected a label from 0 on, got -4"));
  write_fast_dit(3);
  options_.num_classes = 2;
  EXPECT_THAT(message(), HasSubstr("--num-classes: expected at least 3"));
  options_.num_classes = 0;
  write_npy(file("x/toy_features/1.npy"), "<f4", "2, 2, 2, 3", std::vector<float>(24));
  EXPECT_THAT(message(), HasSubstr("expected one sample (C, h, w), got (2, 2, 2, 3)"));
  write_npy(file("x/toy_features/1.npy"), "<f4", "1, 2, 2, 2", std::vector<float>(8));
  EXPECT_THAT(message(), HasSubstr("expected latents (2, 2, 3) as in 0.npy, got (2, 2, 2)"));
  write_npy(file("x/toy_features/1.npy"), "<i8", "1, 2, 2, 3", std::vector<int64_t>(12));
  EXPECT_THAT(message(), HasSubstr("expected floating point values, got I64"));
}

TEST_F(StoreImport, ANanInACacheIsRefusedByName) {
  write_fast_dit(3);
  write_npy(file("x/toy_features/1.npy"), "<f4", "1, 2, 2, 3", std::vector<float>(12, std::nanf("")));
  EXPECT_THAT(message(), HasSubstr("nan in the mean of sample \"1.npy\""));
}

TEST_F(StoreImport, ImpossibleOptionsAreRefused) {
  options_.features = file("nothing");
  options_.out = file("store");
  EXPECT_THAT(message(), HasSubstr("--image-size"));
  options_.image_size = 8;
  EXPECT_THAT(message(), HasSubstr("expected a folder of .npy files"));
  std::filesystem::create_directory(file("nothing"));
  EXPECT_THAT(message(), HasSubstr("expected .npy files, got none"));
  options_.from = "sana";
  EXPECT_THAT(message(), HasSubstr("expected fast-dit or pixart, got \"sana\""));
}

// --- reports ---

std::string printed(const std::function<void(std::FILE*)>& print) {
  char* text = nullptr;
  size_t size = 0;
  std::FILE* stream = ::open_memstream(&text, &size);
  print(stream);
  std::fclose(stream);
  std::string result(text, size);
  std::free(text);
  return result;
}

TEST(StoreReport, StatisticsAreThoseOfTheLatents) {
  const TempFolder folder;
  StoreInfo info = test::small_info();
  info.num_flips = 2;
  test::write_store(folder / "store", info, 50);
  const auto store = FeatureStore::open(folder / "store");
  const LatentStatistics statistics = measure_latents(*store, 1000);
  EXPECT_EQ(statistics.num_samples, 50);
  double sum = 0, squares = 0, variance = 0, count = 0;
  for (int64_t i = 0; i < 50; ++i) {
    for (int64_t e = 0; e < 2 * info.latent_size(); ++e) {
      const double value = test::mean_value(i, e);
      sum += value;
      squares += value * value;
      variance += std::exp(test::logvar_value(i, e));
      count += 1;
    }
  }
  const double mean = sum / count;
  EXPECT_NEAR(statistics.all.mean, mean, 1e-6);
  EXPECT_NEAR(statistics.all.mean_std, std::sqrt(squares / count - mean * mean), 1e-6);
  EXPECT_NEAR(statistics.all.sigma, std::sqrt(variance / count), 1e-6);
  EXPECT_EQ(measure_latents(*store, 7).num_samples, 7);
}

TEST(StoreReport, InspectSaysWhatIsThere) {
  const TempFolder folder;
  test::write_store(folder / "store", test::small_info(), 10);
  const std::string text = printed([&](std::FILE* out) { inspect_store(folder / "store", 100, out); });
  for (const char* part : {"10 in 3 shards", "complete", "2 x 3 x 5, F32, posterior mean and logvar",
                           "autoencoder_kl, weights 0123456789abcdef", "factor 0.18215",
                           "3, of 3 to 4 samples", "newt", "statistics of 10 of 10 samples", "pictures"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
}

TEST(StoreReport, InspectWarnsOfAWrongScale) {
  const TempFolder folder;
  StoreInfo info = test::small_info();
  info.scaling_factor = 5;
  test::write_store(folder / "store", info, 10);
  EXPECT_THAT(printed([&](std::FILE* out) { inspect_store(folder / "store", 100, out); }),
              HasSubstr("is the scaling factor right?"));
}

TEST(StoreReport, VerifyNamesWhatIsBroken) {
  const TempFolder folder;
  test::write_store(folder / "store", test::small_info(), 10);
  EXPECT_THAT(printed([&](std::FILE* out) { verify_store(folder / "store", out); }), HasSubstr("are right"));
  std::filesystem::resize_file(folder / "store" + "/shard-00000.safetensors", 300);
  std::filesystem::remove(folder / "store" + "/shard-00002.safetensors");
  std::string message;
  const std::string text =
      printed([&](std::FILE* out) { message = message_of([&] { verify_store(folder / "store", out); }); });
  EXPECT_THAT(text, has_all("shard-00000.safetensors", "shard-00002.safetensors"));
  EXPECT_THAT(message, HasSubstr("2 of 3 shards are damaged"));
}

}  // namespace
}  // namespace kiln
