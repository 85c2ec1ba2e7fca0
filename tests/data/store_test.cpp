// The feature store: what is written comes back, an interrupted extraction continues.
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <csignal>

#include "core/dtype.h"
#include "data/test_store.h"

namespace kiln {
namespace {

using test::add_samples, test::make_sample, test::small_info, test::write_store;

// Every file of a folder with its content.
std::map<std::string, std::string> contents(const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    files[entry.path().filename().string()] = test::read_bytes(entry.path().string());
  }
  return files;
}

// Names of the files that differ or are in one only.
std::vector<std::string> differing_files(std::map<std::string, std::string> a,
                                         std::map<std::string, std::string> b) {
  std::vector<std::string> names;
  for (const auto& [name, bytes] : a) {
    if (!b.contains(name) || b[name] != bytes) names.push_back(name);
  }
  for (const auto& [name, bytes] : b) {
    if (!a.contains(name)) names.push_back(name);
  }
  return names;
}

void expect_samples(const FeatureStore& store, const StoreInfo& info, int64_t num_samples, float tolerance) {
  ASSERT_EQ(store.size(), num_samples);
  const int64_t size = info.latent_size();
  std::vector<float> values(size);
  for (int64_t i = 0; i < num_samples; ++i) {
    const auto expected = make_sample(info, i);
    EXPECT_EQ(store.sample_name(i), expected.name);
    EXPECT_EQ(store.caption(i), expected.caption);
    EXPECT_EQ(store.label(i), expected.label);
    for (int64_t flip = 0; flip < info.num_flips; ++flip) {
      const auto flips = static_cast<uint8_t>(flip);
      store.read_mean({&i, 1}, {&flips, 1}, values);
      for (int64_t e = 0; e < size; ++e) {
        const float value = expected.mean[flip * size + e];
        ASSERT_NEAR(values[e], value, tolerance * std::abs(value)) << i << " " << e;
      }
      if (!info.has_logvar) continue;
      store.read_logvar({&i, 1}, {&flips, 1}, values);
      for (int64_t e = 0; e < size; ++e) {
        const float value = expected.logvar[flip * size + e];
        ASSERT_NEAR(values[e], value, tolerance * std::abs(value));
      }
    }
  }
}

struct Variant {
  const char* name;
  Dtype dtype;
  int64_t num_flips;
  bool has_logvar, has_labels;
  float tolerance;
};

class StoreRoundTrip : public testing::TestWithParam<Variant> {};

TEST_P(StoreRoundTrip, GivesBackEverySample) {
  const TempFolder folder;
  StoreInfo info = small_info();
  info.dtype = GetParam().dtype;
  info.num_flips = GetParam().num_flips;
  info.has_logvar = GetParam().has_logvar;
  if (!GetParam().has_labels) info.class_names.clear();
  write_store(folder / "store", info, 11);
  const auto store = FeatureStore::open(folder / "store", /*verify=*/true);
  expect_samples(*store, info, 11, GetParam().tolerance);
  EXPECT_EQ(store->info().shards.size(), 3u);
  EXPECT_EQ(store->info().shards.back().num_samples, 3);
  EXPECT_EQ(store->info().class_names, info.class_names);
  EXPECT_EQ(store->info().scaling_factor, info.scaling_factor);
  EXPECT_EQ(store->info().source, info.source);
}

INSTANTIATE_TEST_SUITE_P(All, StoreRoundTrip,
                         testing::Values(Variant{"f32", Dtype::kF32, 1, true, true, 0},
                                         Variant{"bf16", Dtype::kBF16, 2, true, true, 1.0f / 256},
                                         Variant{"fp16", Dtype::kF16, 1, true, false, 1.0f / 2048},
                                         Variant{"plain_flips", Dtype::kF32, 2, false, true, 0}),
                         [](const auto& info) { return info.param.name; });

TEST(FeatureStore, ReadsManySamplesInAnyOrder) {
  const TempFolder folder;
  const StoreInfo info = small_info();
  write_store(folder / "store", info, 9);
  const auto store = FeatureStore::open(folder / "store");
  const std::vector<int64_t> ids = {8, 0, 3, 4, 3};
  const int64_t size = info.latent_size();
  std::vector<float> f32(ids.size() * size);
  store->read_mean(ids, {}, f32);
  for (size_t i = 0; i < ids.size(); ++i) {
    for (int64_t e = 0; e < size; ++e) EXPECT_EQ(f32[i * size + e], test::mean_value(ids[i], e));
  }
}

TEST(FeatureStore, RefusesSamplesThatAreNotThere) {
  const TempFolder folder;
  write_store(folder / "store", small_info(), 3);
  const auto store = FeatureStore::open(folder / "store");
  EXPECT_ERROR(store->label(3), "expected a sample from 0 to 2, got 3");
  EXPECT_ERROR(store->caption(-1), "got -1");
}

TEST(FeatureStoreWriter, SameSamplesGiveTheSameBytes) {
  const TempFolder folder;
  write_store(folder / "a", small_info(), 10);
  write_store(folder / "b", small_info(), 10);
  EXPECT_THAT(differing_files(contents(folder / "a"), contents(folder / "b")), testing::IsEmpty());
}

TEST(FeatureStoreWriter, LargeSamplesMakeSmallShards) {
  const TempFolder folder;
  StoreInfo info = small_info();
  info.channels = 64;
  info.lanes = {{.height = 640, .width = 640}};  // 100 MiB of mean: two fit the limit of a shard
  info.has_logvar = false;
  write_store(folder / "store", info, 3, /*samples_per_shard=*/4096);
  EXPECT_EQ(read_store_info(folder / "store").shards.size(), 2u);
}

// --- continuing ---

TEST(FeatureStoreWriter, ContinuesWhereItStopped) {
  const TempFolder folder;
  const StoreInfo info = small_info();
  write_store(folder / "whole", info, 21);
  for (const int64_t stop : {0, 1, 4, 5, 13, 21}) {
    const std::string path = folder / ("store" + std::to_string(stop));
    {
      const auto writer = FeatureStoreWriter::open(path, info, 4);
      add_samples(*writer, info, stop);
    }  // no finish(): the process went away
    EXPECT_ERROR(FeatureStore::open(path), "run the command that began it again");
    const auto writer = FeatureStoreWriter::open(path, info, 4);
    EXPECT_EQ(writer->num_complete(), stop);
    EXPECT_EQ(writer->last_name(), stop == 0 ? "" : make_sample(info, stop - 1).name);
    add_samples(*writer, info, 21);
    writer->finish();
    EXPECT_THAT(differing_files(contents(path), contents(folder / "whole")), testing::IsEmpty()) << stop;
  }
}

// A child writes without end and is killed at a random moment, again and again, until all samples are there.
TEST(FeatureStoreWriter, SurvivesKillMinusNine) {
  const TempFolder folder;
  StoreInfo info = small_info();
  info.lanes = {{.height = 16, .width = 16}};
  constexpr int64_t kNumSamples = 400;
  write_store(folder / "whole", info, kNumSamples, 16);
  int num_kills = 0;
  int64_t kept = 0;
  for (; num_kills < 200; ++num_kills) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      try {
        const auto writer = FeatureStoreWriter::open(folder / "store", info, 16);
        for (int64_t i = writer->num_complete(); i < kNumSamples; ++i) {
          writer->add(make_sample(info, i));
          ::usleep(50);
        }
        writer->finish();
        ::_exit(0);
      } catch (...) {
        ::_exit(1);
      }
    }
    ::usleep(2000 + 977 * (num_kills % 7));
    ::kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    if (WIFEXITED(status)) {
      ASSERT_EQ(WEXITSTATUS(status), 0);
      break;
    }
    if (!std::filesystem::exists(folder / "store")) continue;
    const int64_t now = FeatureStoreWriter::open(folder / "store", info, 16)->num_complete();
    EXPECT_GE(now, kept);  // what was kept stays
    kept = now;
  }
  EXPECT_GE(num_kills, 2);
  const auto writer = FeatureStoreWriter::open(folder / "store", info, 16);
  add_samples(*writer, info, kNumSamples);
  writer->finish();
  EXPECT_THAT(differing_files(contents(folder / "store"), contents(folder / "whole")), testing::IsEmpty());
}

TEST(FeatureStoreWriter, DropsATornRecord) {
  const TempFolder folder;
  const StoreInfo info = small_info();
  { add_samples(*FeatureStoreWriter::open(folder / "store", info, 100), info, 5); }
  const std::string log = folder / "store" + "/unfinished-shard.log";
  const std::string bytes = test::read_bytes(log);
  for (const size_t cut : {size_t{1}, size_t{60}, bytes.size() / 5 - 1}) {
    test::write_bytes(log, bytes.substr(0, bytes.size() - cut));
    EXPECT_EQ(FeatureStoreWriter::open(folder / "store", info, 100)->num_complete(), 4) << cut;
  }
  std::string flipped = bytes;
  flipped[flipped.size() / 2] ^= 4;  // in the third record
  test::write_bytes(log, flipped);
  EXPECT_EQ(FeatureStoreWriter::open(folder / "store", info, 100)->num_complete(), 2);
  EXPECT_EQ(test::read_bytes(log), bytes.substr(0, test::read_bytes(log).size()));
}

TEST(FeatureStoreWriter, AKillBetweenShardAndLogLosesAndDoublesNothing) {
  const TempFolder folder;
  const StoreInfo info = small_info();
  const std::string log = folder / "store" + "/unfinished-shard.log";
  std::string records;
  {
    const auto writer = FeatureStoreWriter::open(folder / "store", info, 4);
    add_samples(*writer, info, 3);
    records = test::read_bytes(log);
    writer->add(make_sample(info, 3));  // fills the shard, clears the log
  }
  test::write_bytes(log, records);  // as if killed before clearing it
  const auto writer = FeatureStoreWriter::open(folder / "store", info, 4);
  EXPECT_EQ(writer->num_complete(), 4);
  EXPECT_EQ(std::filesystem::file_size(log), 0u);
}

TEST(FeatureStoreWriter, FinishedStoreStaysAsItIs) {
  const TempFolder folder;
  const StoreInfo info = small_info();
  write_store(folder / "store", info, 6);
  const auto before = contents(folder / "store");
  const auto writer = FeatureStoreWriter::open(folder / "store", info, 4);
  EXPECT_EQ(writer->num_complete(), 6);
  EXPECT_ERROR(writer->add(make_sample(info, 6)), "complete with 6 samples");
  writer->finish();
  EXPECT_THAT(differing_files(contents(folder / "store"), before), testing::IsEmpty());
}

// --- refusals ---

TEST(FeatureStoreWriter, RefusesOtherSettings) {
  const TempFolder folder;
  const StoreInfo info = small_info();
  { add_samples(*FeatureStoreWriter::open(folder / "store", info, 4), info, 5); }
  StoreInfo other = info;
  other.scaling_factor = 0.13025;
  other.autoencoder_fingerprint = "fedcba9876543210";
  const std::string message = message_of([&] { FeatureStoreWriter::open(folder / "store", other, 4); });
  EXPECT_THAT(message, has_all("other settings", "scaling_factor (0.18215 there, 0.13025 asked for)",
                               "autoencoder_fingerprint"));
  other = info;
  other.source = {{"path", "others"}, {"dtype", "F32"}};
  EXPECT_ERROR(FeatureStoreWriter::open(folder / "store", other, 4),
               "source dtype (none there, \"F32\" asked for), source path (\"pictures\" there");
  other.source = nullptr;
  EXPECT_ERROR(FeatureStoreWriter::open(folder / "store", other, 4), "source path");
  EXPECT_EQ(FeatureStoreWriter::open(folder / "store", info, 4)->num_complete(), 5);
}

TEST(FeatureStoreWriter, RefusesNonFiniteSamplesByName) {
  const TempFolder folder;
  const StoreInfo info = small_info();
  const auto writer = FeatureStoreWriter::open(folder / "store", info, 4);
  auto sample = make_sample(info, 0);
  sample.mean[17] = std::nanf("");
  EXPECT_ERROR(writer->add(sample), "nan in the mean of sample \"folder/image.0.v2.png\"");
  sample = make_sample(info, 0);
  sample.logvar.back() = -INFINITY;
  EXPECT_ERROR(writer->add(sample), "-inf in the logvar of sample");
  writer->add(make_sample(info, 0));  // and goes on
  writer->finish();
  EXPECT_EQ(FeatureStore::open(folder / "store")->size(), 1);
}

TEST(FeatureStoreWriter, RefusesWhatFp16CannotHold) {
  const TempFolder folder;
  StoreInfo info = small_info();
  info.dtype = Dtype::kF16;
  const auto writer = FeatureStoreWriter::open(folder / "store", info, 4);
  auto sample = make_sample(info, 0);
  sample.mean[3] = 70000;
  EXPECT_ERROR(writer->add(sample), "beyond fp16");
}

TEST(FeatureStoreWriter, RefusesWrongSizesLabelsAndRepeatedNames) {
  const TempFolder folder;
  const StoreInfo info = small_info();
  const auto writer = FeatureStoreWriter::open(folder / "store", info, 4);
  auto sample = make_sample(info, 0);
  sample.logvar.pop_back();
  EXPECT_ERROR(writer->add(sample), "expected 30 values for sample");
  sample = make_sample(info, 0);
  sample.label = 3;
  EXPECT_ERROR(writer->add(sample), "expected a label from -1 to 2");
  writer->add(make_sample(info, 0));
  EXPECT_ERROR(writer->add(make_sample(info, 0)), "is in the store already");
}

TEST(FeatureStoreWriter, RefusesImpossibleSettings) {
  const TempFolder folder;
  StoreInfo info = small_info();
  info.scaling_factor = 0;
  EXPECT_ERROR(FeatureStoreWriter::open(folder / "store", info), "scaling_factor");
  info = small_info();
  info.channels = 0;
  EXPECT_ERROR(FeatureStoreWriter::open(folder / "store", info), "\"channels\"");
  info = small_info();
  info.dtype = Dtype::kI64;
  EXPECT_ERROR(FeatureStoreWriter::open(folder / "store", info), "F32, BF16 or F16");
}

TEST(FeatureStoreWriter, RefusesAnEmptyStore) {
  const TempFolder folder;
  const auto writer = FeatureStoreWriter::open(folder / "store", small_info());
  EXPECT_ERROR(writer->finish(), "expected at least one sample");
}

TEST(FeatureStoreWriter, RefusesAFolderWithOtherThings) {
  const TempFolder folder;
  std::filesystem::create_directory(folder / "pictures");
  test::write_bytes(folder / "pictures" + "/a.png", "x");
  EXPECT_ERROR(FeatureStoreWriter::open(folder / "pictures", small_info()), "got a folder with \"a.png\"");
}

TEST(FeatureStoreWriter, TwoWritersDoNotMix) {
  const TempFolder folder;
  const auto writer = FeatureStoreWriter::open(folder / "store", small_info());
  EXPECT_ERROR(FeatureStoreWriter::open(folder / "store", small_info()),
               "another process is writing this store");
}

// Runs `action` in a child and gives the message of its Error, "" if it threw none.
template <class Action>
std::string message_in_child(Action&& action) {
  int pipe_ends[2];
  EXPECT_EQ(::pipe(pipe_ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    std::string message;
    try {
      action();
    } catch (const Error& error) {
      message = error.what();
    }
    const ssize_t written = ::write(pipe_ends[1], message.data(), message.size());
    ::_exit(written == static_cast<ssize_t>(message.size()) ? 0 : 1);
  }
  ::close(pipe_ends[1]);
  std::string message(4096, '\0');
  const ssize_t count = ::read(pipe_ends[0], message.data(), message.size());
  ::close(pipe_ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  message.resize(std::max<ssize_t>(count, 0));
  return message;
}

TEST(FeatureStoreWriter, NoPermissionIsOneLine) {
  const TempFolder folder;
  std::filesystem::create_directory(folder / "locked");
  std::filesystem::permissions(folder / "locked",
                               std::filesystem::perms::owner_read | std::filesystem::perms::owner_exec);
  const std::string message = message_in_child([&] {
    // Root may write anywhere: become nobody. The folder above must stay reachable.
    if (::geteuid() == 0) {
      std::filesystem::permissions(folder / "", std::filesystem::perms::all);
      std::filesystem::permissions(folder / "locked", static_cast<std::filesystem::perms>(0555));
      if (::setuid(65534) != 0) ::_exit(1);
    }
    FeatureStoreWriter::open(folder / "locked" + "/store", small_info());
  });
  EXPECT_THAT(message, has_all("cannot create", "Permission denied"));
}

// A file size limit stands in for a full disk: the same error path, without a file system of our own.
TEST(FeatureStoreWriter, FullDiskKeepsWhatIsThere) {
  const TempFolder folder;
  StoreInfo info = small_info();
  info.lanes = {{.height = 32, .width = 32}};
  const std::string message = message_in_child([&] {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{100'000, 100'000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    add_samples(*FeatureStoreWriter::open(folder / "store", info, 100), info, 20);
  });
  EXPECT_THAT(message, has_all("cannot write", "the samples so far are kept"));
  const auto writer = FeatureStoreWriter::open(folder / "store", info, 100);
  EXPECT_EQ(writer->num_complete(), 6);  // of 16,385 bytes and a little each
  add_samples(*writer, info, 20);
  writer->finish();
  expect_samples(*FeatureStore::open(folder / "store", true), info, 20, 0);
}

TEST(FeatureStoreWriter, FullDiskWhileWritingAShardLeavesNoPart) {
  const TempFolder folder;
  const StoreInfo info = small_info();
  const std::string message = message_in_child([&] {
    ::signal(SIGXFSZ, SIG_IGN);
    const auto writer = FeatureStoreWriter::open(folder / "store", info, 100);
    add_samples(*writer, info, 50);
    const rlimit limit{5'000, 5'000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    writer->finish();
  });
  EXPECT_THAT(message, has_all("cannot write", "shard-00000.safetensors"));
  EXPECT_FALSE(std::filesystem::exists(folder / "store" + "/shard-00000.safetensors"));
  EXPECT_FALSE(std::filesystem::exists(folder / "store" + "/shard-00000.safetensors.kiln.partial"));
  const auto writer = FeatureStoreWriter::open(folder / "store", info, 100);
  EXPECT_EQ(writer->num_complete(), 50);
  writer->finish();
  expect_samples(*FeatureStore::open(folder / "store", true), info, 50, 0);
}

}  // namespace
}  // namespace kiln
