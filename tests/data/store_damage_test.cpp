// Damaged and hostile stores: refused in one line that names the file and the remedy, never a crash.

#include <array>
#include <functional>

#include "data/test_store.h"

namespace kiln {
namespace {

using test::small_info, test::write_store;

class DamagedStore : public testing::Test {
 protected:
  DamagedStore() { write_store(path(), small_info(), 10); }
  std::string path() const { return folder_ / "store"; }
  std::string file(const std::string& name) const { return path() + "/" + name; }
  std::string open_message() const {
    return message_of([this] { FeatureStore::open(path()); });
  }
  void change_store_json(const std::function<void(nlohmann::json&)>& change) {
    auto root = nlohmann::json::parse(read_bytes(file("store.json")));
    change(root);
    write_bytes(file("store.json"), root.dump());
  }
  void set_field(const std::string& key, const nlohmann::json& value) {
    change_store_json([&](nlohmann::json& root) { root[key] = value; });
  }

 private:
  TempFolder folder_;
};

TEST_F(DamagedStore, WholeOneHasNoProblems) {
  int64_t last_done = 0;
  EXPECT_THAT(find_store_problems(path(),
                                  [&](int64_t done, int64_t total) {
                                    EXPECT_EQ(total, 3);
                                    EXPECT_EQ(done, ++last_done);
                                  }),
              IsEmpty());
  EXPECT_EQ(last_done, 3);
}

TEST_F(DamagedStore, NotAStore) {
  std::filesystem::remove(file("store.json"));
  EXPECT_THAT(open_message(), HasSubstr("expected a folder with store.json"));
}

TEST_F(DamagedStore, MissingShardIsNamed) {
  std::filesystem::remove(file("shard-00001.safetensors"));
  EXPECT_THAT(open_message(), HasSubstr("shard shard-00001.safetensors is missing"));
  EXPECT_THAT(find_store_problems(path()), ElementsAre(HasSubstr("shard-00001.safetensors is missing")));
}

TEST_F(DamagedStore, TruncatedShardIsNamed) {
  const std::string bytes = read_bytes(file("shard-00002.safetensors"));
  for (const size_t size : {size_t{0}, size_t{5}, size_t{100}, bytes.size() / 2, bytes.size() - 1}) {
    write_bytes(file("shard-00002.safetensors"), bytes.substr(0, size));
    EXPECT_THAT(open_message(), HasSubstr("shard-00002.safetensors")) << size;
    EXPECT_THAT(find_store_problems(path()), ElementsAre(HasSubstr("shard-00002.safetensors"))) << size;
  }
}

TEST_F(DamagedStore, EveryBitFlipIsFoundAndNamed) {
  const std::string bytes = read_bytes(file("shard-00001.safetensors"));
  for (size_t at = 0; at < bytes.size(); at += 37) {
    std::string flipped = bytes;
    flipped[at] ^= static_cast<char>(1 << (at % 8));
    write_bytes(file("shard-00001.safetensors"), flipped);
    ASSERT_THAT(find_store_problems(path()), ElementsAre(HasSubstr("shard-00001.safetensors"))) << at;
  }
  const std::string message = message_of([this] { FeatureStore::open(path(), /*verify=*/true); });
  EXPECT_THAT(message, HasSubstr("1 of 3 shards are damaged"));
}

// Training that reads a store must not learn from bytes that changed on the disk.
TEST_F(DamagedStore, ReadingAFlippedBitNamesTheSample) {
  std::string bytes = read_bytes(file("shard-00001.safetensors"));
  const float mean = test::mean_value(6, 7), logvar = test::logvar_value(5, 3);
  const auto flip = [&](float value) {
    const size_t at = bytes.find(std::string(reinterpret_cast<const char*>(&value), 4));
    ASSERT_NE(at, bytes.npos);
    bytes[at] ^= 1;
  };
  flip(mean);
  flip(logvar);
  write_bytes(file("shard-00001.safetensors"), bytes);
  const auto store = FeatureStore::open(path());
  std::vector<float> out(store->info().latent_size());
  const auto read = [&](int64_t id, bool of_logvar) {
    return message_of([&] {
      of_logvar ? store->read_logvar({&id, 1}, {}, out) : store->read_mean({&id, 1}, {}, out);
    });
  };
  for (const int64_t whole : {0, 4, 5, 7, 9})
    EXPECT_NO_THROW(store->read_mean({&whole, 1}, {}, out)) << whole;
  for (int time = 0; time < 2; ++time)
    EXPECT_THAT(read(6, false), HasSubstr("sample \"folder/image.6.v2.png\" is damaged")) << time;
  const int64_t six = 6;
  EXPECT_NO_THROW(store->read_logvar({&six, 1}, {}, out));
  EXPECT_THAT(read(5, true), HasSubstr("sample \"folder/image.5.v2.png\" is damaged"));
}

TEST_F(DamagedStore, NanInAShardIsNamedWithItsSample) {
  // A NaN that the checksum agrees with: written by something that did not check.
  std::string bytes = read_bytes(file("shard-00001.safetensors"));
  const float value = test::mean_value(6, 7), nan = std::nanf("");
  const size_t at = bytes.find(std::string(reinterpret_cast<const char*>(&value), 4));
  ASSERT_NE(at, bytes.npos);
  bytes.replace(at, 4, reinterpret_cast<const char*>(&nan), 4);
  write_bytes(file("shard-00001.safetensors"), bytes);
  const std::string problem = find_store_problems(path()).at(0);
  change_store_json([&](nlohmann::json& root) {
    root["shards"][1]["xxh3"] = problem.substr(problem.find("got ") + 4, 16);
  });
  EXPECT_THAT(find_store_problems(path()),
              ElementsAre(HasSubstr("the mean of sample \"folder/image.6.v2.png\" holds NaN or infinity")));
}

// A shard of another store in place of one's own, and labels that somebody changed.
TEST_F(DamagedStore, HardeningHigh2ExchangedAndRelabelledShardsAreNamed) {
  const std::string shard = file("shard-00001.safetensors"), good = read_bytes(shard);
  const TempFolder other;
  StoreInfo info = small_info();
  info.scaling_factor = 0.5;
  {
    const auto writer = FeatureStoreWriter::open(other / "store", info, 4);
    for (int64_t i = 0; i < 10; ++i) {
      auto sample = test::make_sample(info, i);
      sample.name += ".other";
      writer->add(sample);
    }
    writer->finish();
  }
  write_bytes(shard, read_bytes(other / "store/shard-00001.safetensors"));
  EXPECT_THAT(open_message(), has_all("shard-00001.safetensors is not the shard", "it was exchanged"));
  // Two shards of one store, exchanged.
  write_bytes(shard, read_bytes(file("shard-00000.safetensors")));
  EXPECT_THAT(open_message(), HasSubstr("shard-00001.safetensors is not the shard"));
  // Labels 1, 2, 0, 1 of samples 4 to 7.
  const std::array<int64_t, 4> labels = {1, 2, 0, 1}, others = {2, 2, 0, 1};
  const auto bytes_of = [](const std::array<int64_t, 4>& column) {
    return std::string(reinterpret_cast<const char*>(column.data()), sizeof column);
  };
  std::string relabelled = good;
  const size_t at = relabelled.find(bytes_of(labels));
  ASSERT_NE(at, relabelled.npos);
  relabelled.replace(at, sizeof labels, bytes_of(others));
  write_bytes(shard, relabelled);
  EXPECT_THAT(open_message(), HasSubstr("labels, names or captions have changed"));
  write_bytes(shard, good);
  EXPECT_NO_THROW(FeatureStore::open(path(), /*verify=*/true));
}

TEST_F(DamagedStore, HardeningHigh2AStoreOfAnEarlierVersionOpens) {
  change_store_json([](nlohmann::json& root) {
    for (auto& shard : root["shards"]) shard.erase("columns_xxh3");
  });
  const auto store = FeatureStore::open(path(), /*verify=*/true);
  EXPECT_EQ(store->info().shards.at(0).columns_xxh3, "");
  EXPECT_EQ(store->label(4), 1);
}

TEST_F(DamagedStore, NewerVersionSaysUpdate) {
  set_field("format_version", 3);
  EXPECT_THAT(open_message(), has_all("expected format version 2 at most, got 3", "newer kiln"));
}

TEST_F(DamagedStore, ShapesThatDoNotFitAreRefused) {
  set_field("lanes", {{{"height", 3}, {"width", 6}}});
  EXPECT_THAT(open_message(), HasSubstr("expected mean F32 (4, 1, 2, 3, 6), got F32 (4, 1, 2, 3, 5)"));
  set_field("lanes", {{{"height", 3}, {"width", 5}}});
  set_field("dtype", "BF16");
  EXPECT_THAT(open_message(), HasSubstr("expected mean BF16"));
}

TEST_F(DamagedStore, LabelsBeyondTheClassesAreRefused) {
  set_field("class_names", nlohmann::json::array({"cat", "dog"}));
  EXPECT_THAT(open_message(),
              HasSubstr("expected a label from -1 to 1 for sample \"folder/image.2.v2.png\", got 2"));
}

TEST_F(DamagedStore, HostileFieldsAreRefused) {
  const auto shard = [](const std::string& file, const nlohmann::json& count) {
    return nlohmann::json::array({{{"file", file}, {"num_samples", count}, {"xxh3", "0"}}});
  };
  const std::vector<std::tuple<std::string, nlohmann::json, std::string>> cases = {
      {"format", "zip", "not a feature store"},
      {"format_version", "1", "\"format_version\""},
      {"format_version", 0, "\"format_version\""},
      {"channels", -1, "\"channels\""},
      {"channels", uint64_t{1} << 63, "\"channels\""},
      {"lanes", nullptr, "\"lanes\""},
      {"lanes", nlohmann::json::array(), "1 to 4096 lanes"},
      {"lanes", {{{"height", 1e300}, {"width", 5}}}, "\"height\""},
      {"lanes", {{{"height", 3}, {"width", nullptr}}}, "\"width\""},
      {"num_flips", 3, "\"num_flips\""},
      {"has_logvar", 1, "\"has_logvar\""},
      {"scaling_factor", "0.18", "\"scaling_factor\""},
      {"dtype", "I64", "F32, BF16 or F16"},
      {"dtype", "float", "expected one of"},
      {"class_names", "cat", "\"class_names\""},
      {"class_names", {1, 2}, "\"class_names\""},
      {"num_samples", 11, "expected 11 samples in the shards, got 10"},
      {"shards", nlohmann::json::object(), "\"shards\""},
      {"shards", {1}, "expected a JSON object"},
      {"shards", shard("../../etc/passwd", 10), "plain file name"},
      {"shards", shard("/etc/passwd", 10), "plain file name"},
      {"shards", shard("", 10), "plain file name"},
      {"shards", shard(std::string("a\0b", 3), 10), "plain file name"},
      {"shards", shard("a", 0), "\"num_samples\""},
  };
  const std::string good = read_bytes(file("store.json"));
  for (const auto& [key, value, expected] : cases) {
    set_field(key, value);
    EXPECT_THAT(open_message(), HasSubstr(expected)) << key << " " << value;
    write_bytes(file("store.json"), good);
  }
  for (const std::string text : {"", "{", "[]", "\x00\xff\xfe", "null", "{\"format\": 3}"}) {
    write_bytes(file("store.json"), text);
    EXPECT_THAT(open_message(), HasSubstr("store.json")) << text;
  }
  write_bytes(file("store.json"), std::string(1 << 20, '['));
  EXPECT_THAT(open_message(), HasSubstr("nested levels"));
}

TEST_F(DamagedStore, WorksFromAReadOnlyFolder) {
  std::filesystem::permissions(path(), static_cast<std::filesystem::perms>(0555));
  EXPECT_EQ(FeatureStore::open(path(), /*verify=*/true)->size(), 10);
  std::filesystem::permissions(path(), std::filesystem::perms::owner_all);
}

TEST_F(DamagedStore, ADamagedShardStopsContinuing) {
  set_field("complete", false);
  std::filesystem::resize_file(file("shard-00000.safetensors"), 200);
  EXPECT_ERROR(FeatureStoreWriter::open(path(), small_info(), 4), "shard-00000.safetensors");
}

}  // namespace
}  // namespace kiln
