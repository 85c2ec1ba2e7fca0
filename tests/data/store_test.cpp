// The feature store: what is written comes back, an interrupted extraction continues.
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <csignal>
#include <map>
#include <set>

#include "core/dtype.h"
#include "data/test_store.h"

namespace kiln {
namespace {

using test::add_samples, test::make_sample, test::small_info, test::write_store;

// The files that differ or are in one folder only.
using Files = std::map<std::string, std::string>;
Files contents(const std::string& folder) {
  Files files;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    files[entry.path().filename().string()] = read_bytes(entry.path().string());
  return files;
}
std::set<std::string> differing_files(Files a, Files b) {
  std::set<std::string> names;
  for (const Files& files : {a, b})
    for (const auto& [name, bytes] : files)
      if (!a.contains(name) || !b.contains(name) || a[name] != b[name]) names.insert(name);
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

class StoreWriter : public testing::Test {
 protected:
  std::unique_ptr<FeatureStoreWriter> open(int64_t samples_per_shard = 4) const {
    return FeatureStoreWriter::open(path_, info_, samples_per_shard);
  }
  void add_to(int64_t num_samples, int64_t samples_per_shard = 4) const {
    add_samples(*open(samples_per_shard), info_, num_samples);
  }
  // Adds what is missing of so many samples, which then are the store.
  void finish(FeatureStoreWriter& writer, int64_t num_samples) const {
    add_samples(writer, info_, num_samples);
    writer.finish();
  }
  // Sample 0, changed, is refused with this text.
  void expect_refusal(FeatureStoreWriter& writer, const auto& change, const std::string& text) const {
    auto sample = make_sample(info_, 0);
    change(sample);
    EXPECT_ERROR(writer.add(sample), text);
  }

  const TempFolder folder_;
  const std::string path_ = folder_ / "store";
  StoreInfo info_ = small_info();
};

TEST_F(StoreWriter, SameSamplesGiveTheSameBytes) {
  write_store(folder_ / "a", small_info(), 10);
  write_store(folder_ / "b", small_info(), 10);
  EXPECT_THAT(differing_files(contents(folder_ / "a"), contents(folder_ / "b")), IsEmpty());
}

TEST_F(StoreWriter, LargeSamplesMakeSmallShards) {
  info_.channels = 64;
  info_.lanes = {{.height = 640, .width = 640}};  // 100 MiB of mean: two fit the limit of a shard
  info_.has_logvar = false;
  write_store(path_, info_, 3, /*samples_per_shard=*/4096);
  EXPECT_EQ(read_store_info(path_).shards.size(), 2u);
}

// --- continuing ---

TEST_F(StoreWriter, ContinuesWhereItStopped) {
  write_store(folder_ / "whole", info_, 21);
  for (const int64_t stop : {0, 1, 4, 5, 13, 21}) {
    const std::string path = folder_ / ("store" + std::to_string(stop));
    {
      const auto writer = FeatureStoreWriter::open(path, info_, 4);
      add_samples(*writer, info_, stop);
    }  // no finish(): the process went away
    EXPECT_ERROR(FeatureStore::open(path), "run the command that began it again");
    const auto writer = FeatureStoreWriter::open(path, info_, 4);
    EXPECT_EQ(writer->num_complete(), stop);
    EXPECT_EQ(writer->last_name(), stop == 0 ? "" : make_sample(info_, stop - 1).name);
    finish(*writer, 21);
    EXPECT_THAT(differing_files(contents(path), contents(folder_ / "whole")), IsEmpty()) << stop;
  }
}

// A child writes without end and is killed at a random moment, again and again, until all samples are there.
TEST_F(StoreWriter, SurvivesKillMinusNine) {
  info_.lanes = {{.height = 16, .width = 16}};
  constexpr int64_t kNumSamples = 400;
  write_store(folder_ / "whole", info_, kNumSamples, 16);
  int num_kills = 0;
  int64_t kept = 0;
  for (; num_kills < 200; ++num_kills) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      try {
        const auto writer = open(16);
        for (int64_t i = writer->num_complete(); i < kNumSamples; ++i) {
          writer->add(make_sample(info_, i));
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
    if (!std::filesystem::exists(path_)) continue;
    const int64_t now = open(16)->num_complete();
    EXPECT_GE(now, kept);  // what was kept stays
    kept = now;
  }
  EXPECT_GE(num_kills, 2);
  const auto writer = open(16);
  finish(*writer, kNumSamples);
  EXPECT_THAT(differing_files(contents(path_), contents(folder_ / "whole")), IsEmpty());
}

TEST_F(StoreWriter, DropsATornRecord) {
  add_to(5, 100);
  const std::string log = path_ + "/unfinished-shard.log";
  const std::string bytes = read_bytes(log);
  for (const size_t cut : {size_t{1}, size_t{60}, bytes.size() / 5 - 1}) {
    write_bytes(log, bytes.substr(0, bytes.size() - cut));
    EXPECT_EQ(open(100)->num_complete(), 4) << cut;
  }
  std::string flipped = bytes;
  flipped[flipped.size() / 2] ^= 4;  // in the third record
  write_bytes(log, flipped);
  EXPECT_EQ(open(100)->num_complete(), 2);
  EXPECT_EQ(read_bytes(log), bytes.substr(0, read_bytes(log).size()));
}

TEST_F(StoreWriter, AKillBetweenShardAndLogLosesAndDoublesNothing) {
  const std::string log = path_ + "/unfinished-shard.log";
  std::string records;
  {
    const auto writer = open();
    add_samples(*writer, info_, 3);
    records = read_bytes(log);
    writer->add(make_sample(info_, 3));  // fills the shard, clears the log
  }
  write_bytes(log, records);  // as if killed before clearing it
  const auto writer = open();
  EXPECT_EQ(writer->num_complete(), 4);
  EXPECT_EQ(std::filesystem::file_size(log), 0u);
}

TEST_F(StoreWriter, FinishedStoreStaysAsItIs) {
  write_store(path_, info_, 6);
  const auto before = contents(path_);
  const auto writer = open();
  EXPECT_EQ(writer->num_complete(), 6);
  EXPECT_ERROR(writer->add(make_sample(info_, 6)), "complete with 6 samples");
  writer->finish();
  EXPECT_THAT(differing_files(contents(path_), before), IsEmpty());
}

// --- refusals ---

TEST_F(StoreWriter, RefusesOtherSettings) {
  add_to(5);
  const auto refuses = [&](const auto& change, const auto&... texts) {
    StoreInfo other = info_;
    change(other);
    EXPECT_ERROR(FeatureStoreWriter::open(path_, other, 4), texts...);
  };
  refuses(
      [](StoreInfo& other) {
        other.scaling_factor = 0.13025;
        other.autoencoder_fingerprint = "fedcba9876543210";
      },
      "other settings", "scaling_factor (0.18215 there, 0.13025 asked for)", "autoencoder_fingerprint");
  refuses(
      [](StoreInfo& other) {
        other.source = {{"path", "others"}, {"dtype", "F32"}};
      },
      "source dtype (none there, \"F32\" asked for), source path (\"pictures\" there");
  refuses([](StoreInfo& other) { other.source = nullptr; }, "source path");
  EXPECT_EQ(open()->num_complete(), 5);
}

TEST_F(StoreWriter, RefusesNonFiniteSamplesByName) {
  const auto writer = open();
  expect_refusal(
      *writer, [](auto& sample) { sample.mean[17] = std::nanf(""); },
      "nan in the mean of sample \"folder/image.0.v2.png\"");
  expect_refusal(
      *writer, [](auto& sample) { sample.logvar.back() = -INFINITY; }, "-inf in the logvar of sample");
  finish(*writer, 1);  // and goes on
  EXPECT_EQ(FeatureStore::open(path_)->size(), 1);
}

TEST_F(StoreWriter, RefusesWhatFp16CannotHold) {
  info_.dtype = Dtype::kF16;
  expect_refusal(
      *open(), [](auto& sample) { sample.mean[3] = 70000; }, "beyond fp16");
}

TEST_F(StoreWriter, RefusesWrongSizesLabelsAndRepeatedNames) {
  const auto writer = open();
  expect_refusal(
      *writer, [](auto& sample) { sample.logvar.pop_back(); }, "expected 30 values for sample");
  expect_refusal(
      *writer, [](auto& sample) { sample.label = 3; }, "expected a label from -1 to 2");
  add_samples(*writer, info_, 1);
  expect_refusal(
      *writer, [](auto&) {}, "is in the store already");
}

TEST_F(StoreWriter, RefusesImpossibleSettings) {
  info_.scaling_factor = 0;
  EXPECT_ERROR(open(), "scaling_factor");
  info_ = small_info();
  info_.channels = 0;
  EXPECT_ERROR(open(), "\"channels\"");
  info_ = small_info();
  info_.dtype = Dtype::kI64;
  EXPECT_ERROR(open(), "F32, BF16 or F16");
}

TEST_F(StoreWriter, RefusesAnEmptyStore) {
  const auto writer = FeatureStoreWriter::open(path_, small_info());
  EXPECT_ERROR(writer->finish(), "expected at least one sample");
}

TEST_F(StoreWriter, RefusesAFolderWithOtherThings) {
  std::filesystem::create_directory(folder_ / "pictures");
  write_bytes(folder_ / "pictures" + "/a.png", "x");
  EXPECT_ERROR(FeatureStoreWriter::open(folder_ / "pictures", small_info()), "got a folder with \"a.png\"");
}

TEST_F(StoreWriter, TwoWritersDoNotMix) {
  const auto writer = FeatureStoreWriter::open(path_, small_info());
  EXPECT_ERROR(FeatureStoreWriter::open(path_, small_info()), "another process is writing this store");
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

TEST_F(StoreWriter, NoPermissionIsOneLine) {
  std::filesystem::create_directory(folder_ / "locked");
  std::filesystem::permissions(folder_ / "locked",
                               std::filesystem::perms::owner_read | std::filesystem::perms::owner_exec);
  const std::string message = message_in_child([&] {
    // Root may write anywhere: become nobody. The folder above must stay reachable.
    if (::geteuid() == 0) {
      std::filesystem::permissions(folder_ / "", std::filesystem::perms::all);
      std::filesystem::permissions(folder_ / "locked", static_cast<std::filesystem::perms>(0555));
      if (::setuid(65534) != 0) ::_exit(1);
    }
    FeatureStoreWriter::open(folder_ / "locked" + "/store", small_info());
  });
  EXPECT_THAT(message, has_all("cannot create", "Permission denied"));
}

// A file size limit stands in for a full disk: the same error path, without a file system of our own.
TEST_F(StoreWriter, FullDiskKeepsWhatIsThere) {
  info_.lanes = {{.height = 32, .width = 32}};
  const std::string message = message_in_child([&] {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{100'000, 100'000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    add_to(20, 100);
  });
  EXPECT_THAT(message, has_all("cannot write", "the samples so far are kept"));
  const auto writer = open(100);
  EXPECT_EQ(writer->num_complete(), 6);  // of 16,385 bytes and a little each
  finish(*writer, 20);
  expect_samples(*FeatureStore::open(path_, true), info_, 20, 0);
}

TEST_F(StoreWriter, FullDiskWhileWritingAShardLeavesNoPart) {
  const std::string message = message_in_child([&] {
    ::signal(SIGXFSZ, SIG_IGN);
    const auto writer = open(100);
    add_samples(*writer, info_, 50);
    const rlimit limit{5'000, 5'000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    writer->finish();
  });
  EXPECT_THAT(message, has_all("cannot write", "shard-00000.safetensors"));
  EXPECT_FALSE(std::filesystem::exists(path_ + "/shard-00000.safetensors"));
  EXPECT_FALSE(std::filesystem::exists(path_ + "/shard-00000.safetensors.kiln.partial"));
  const auto writer = open(100);
  EXPECT_EQ(writer->num_complete(), 50);
  writer->finish();
  expect_samples(*FeatureStore::open(path_, true), info_, 50, 0);
}

}  // namespace
}  // namespace kiln
