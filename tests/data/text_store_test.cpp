// The text store: captions shared and weighted, every damage noticed, an interrupted writing continued.

#include <cstring>

#include "data/test_store.h"
#include "data/text_store/text_store.h"
#include "data/text_store/text_store_writer.h"

namespace kiln {
namespace {

constexpr int64_t kWidth = 3;

const TextStoreInfo kInfo = test::small_text_info(kWidth, 4, 2, Dtype::kBF16);

// Four samples, four entries: "", "red", "an apple", "green".
CaptionTable small_table() {
  CaptionTable table;
  table.add_sample("a.png",
                   std::vector<Caption>{{.text = "red"}, {.text = "an apple", .kind = "long", .weight = 3}});
  table.add_sample("b.png", std::vector<Caption>{{.text = "red"}});
  table.add_sample("c.png", {});
  table.add_sample("d.png", std::vector<Caption>{{.text = "green", .weight = 0}, {.text = "an apple"}});
  return table;
}

int64_t rows_of_entry(int64_t entry) { return entry % 4 + 1; }

void write_shard(TextStoreWriter& writer, int64_t shard) {
  std::vector<int64_t> rows;
  std::vector<uint16_t> features;
  const EntryRange range = shard_entries(writer.info(), shard);
  for (int64_t entry = range.first; entry < range.first + range.count; ++entry) {
    rows.push_back(rows_of_entry(entry));
    features.insert(features.end(), rows_of_entry(entry) * kWidth, float_to_bf16(static_cast<float>(entry)));
  }
  writer.write_shard(shard, rows, std::as_bytes(std::span(features)), /*num_truncated=*/shard);
}

void write_text_store(const std::string& folder) {
  const CaptionTable table = small_table();
  TextStoreWriter writer(folder, kInfo, table);
  for (int64_t shard = 0; shard < writer.info().num_shards(); ++shard) write_shard(writer, shard);
  writer.finish(table);
}

TEST(TextStore, GivesWhatWasWritten) {
  const TempFolder folder;
  write_text_store(folder / "text-x");
  EXPECT_THAT(find_text_stores(folder.path().string()), ElementsAre("x"));
  const auto store = TextStore::open(folder / "text-x", /*verify=*/true);
  EXPECT_EQ(store->info().num_samples, 4);
  EXPECT_EQ(store->info().num_entries, 4);
  EXPECT_EQ(store->info().num_without_caption, 1);
  EXPECT_EQ(store->info().num_truncated, 1);
  EXPECT_THAT(store->entries(0), ElementsAre(1, 2));
  EXPECT_THAT(store->entries(1), ElementsAre(1)) << "equal captions are one entry";
  EXPECT_THAT(store->entries(2), ElementsAre(TextStore::kNullEntry));
  EXPECT_EQ(store->text(2), "an apple");
  EXPECT_EQ(store->text(0), "");
  EXPECT_EQ(store->info().kinds.at(store->kinds(0)[1]), "long");
  for (int64_t entry = 0; entry < 4; ++entry) {
    EXPECT_EQ(store->num_rows(entry), rows_of_entry(entry));
    ASSERT_EQ(static_cast<int64_t>(store->rows(entry).size()), rows_of_entry(entry) * kWidth * 2);
    uint16_t bits;
    std::memcpy(&bits, store->rows(entry).data(), sizeof bits);
    EXPECT_EQ(bf16_to_float(bits), static_cast<float>(entry));
  }
  const std::vector<int64_t> soon = {0, 3};
  store->prefetch(soon);
  EXPECT_ERROR(store->entries(4), "expected sample 0 to 3, got 4");
  EXPECT_ERROR(store->rows(-1), "expected caption 0 to 3, got -1");
}

TEST(TextStore, ChoosesCaptionsByWeight) {
  const TempFolder folder;
  write_text_store(folder / "text-x");
  const auto store = TextStore::open(folder / "text-x");
  EXPECT_EQ(store->entry(0, 0.0), 1);
  EXPECT_EQ(store->entry(0, 0.2499), 1);
  EXPECT_EQ(store->entry(0, 0.25), 2) << "weights 1 and 3";
  EXPECT_EQ(store->entry(0, std::nextafter(1.0, 0.0)), 2);
  for (const double u : {0.0, 0.5, 0.999}) EXPECT_EQ(store->entry(3, u), 2) << "weight 0 is never chosen";
}

TEST(TextStore, GoesOnWithShardsThatAreThere) {
  const TempFolder folder, whole;
  const CaptionTable table = small_table();
  {
    TextStoreWriter writer(folder / "text-x", kInfo, table);
    write_shard(writer, 1);
  }
  EXPECT_ERROR(TextStore::open(folder / "text-x"), "unfinished");
  {
    TextStoreWriter writer(folder / "text-x", kInfo, table);
    EXPECT_FALSE(writer.is_complete());
    EXPECT_FALSE(writer.has_shard(0));
    EXPECT_TRUE(writer.has_shard(1));
    EXPECT_ERROR(writer.finish(table), "features-00000");
    write_shard(writer, 0);
    writer.finish(table);
  }
  write_text_store(whole / "text-x");
  for (const char* file :
       {"text.json", "captions.safetensors", "features-00000.safetensors", "features-00001.safetensors"})
    EXPECT_EQ(test::read_bytes(folder / ("text-x/" + std::string(file))),
              test::read_bytes(whole / ("text-x/" + std::string(file))))
        << file;
  EXPECT_TRUE(TextStoreWriter(folder / "text-x", kInfo, table).is_complete());
}

TEST(TextStore, RefusesOtherSettingsByName) {
  const TempFolder folder;
  write_text_store(folder / "text-x");
  TextStoreInfo other = kInfo;
  other.encoder_fingerprint = "xxh3:9";
  other.max_tokens = 5;
  EXPECT_ERROR(TextStoreWriter(folder / "text-x", other, small_table()),
               "the text encoder (bert xxh3:1 there, bert xxh3:9 here)", "--text-max-tokens");
  CaptionTable captions = small_table();
  captions.add_sample("e.png", {});
  EXPECT_ERROR(TextStoreWriter(folder / "text-x", kInfo, captions), "their captions");
}

TEST(TextStore, EveryFlippedByteIsFound) {
  const TempFolder folder;
  write_text_store(folder / "text-x");
  for (const char* name : {"text-x/captions.safetensors", "text-x/features-00000.safetensors"}) {
    const std::string path = folder / name, good = test::read_bytes(path);
    for (size_t i = 0; i < good.size(); i += 7) {
      std::string bad = good;
      bad[i] = static_cast<char>(bad[i] ^ 0x10);
      test::write_bytes(path, bad);
      EXPECT_THROW(TextStore::open(folder / "text-x", /*verify=*/true), Error) << name << " byte " << i;
    }
    test::write_bytes(path, good.substr(0, good.size() / 2));
    EXPECT_THROW(TextStore::open(folder / "text-x"), Error) << name;
    test::write_bytes(path, good);
  }
  EXPECT_NO_THROW(TextStore::open(folder / "text-x", /*verify=*/true));
}

// text.json as an earlier version wrote it.
void remove_new_checksums(const std::string& folder) {
  auto text = nlohmann::json::parse(test::read_bytes(folder + "/text.json"));
  text.erase("columns_xxh3");
  text.erase("samples_xxh3");
  test::write_bytes(folder + "/text.json", text.dump());
}

void flip_byte(const std::string& path, const std::string& before, size_t behind) {
  std::string bytes = test::read_bytes(path);
  const size_t at = bytes.find(before);
  ASSERT_NE(at, bytes.npos);
  bytes[at + behind] ^= 1;
  test::write_bytes(path, bytes);
}

// Features that were overwritten train nobody: the caption is named at its first read, and by every later
// one.
TEST(HardeningHigh1, TextFeaturesAreComparedAtTheirFirstRead) {
  const TempFolder folder;
  write_text_store(folder / "text-x");
  const std::string features = folder / "text-x/features-00001.safetensors";
  const uint16_t three = float_to_bf16(3);  // entry 3, the last of shard 1
  flip_byte(features, std::string(reinterpret_cast<const char*>(&three), 2), 2);
  const auto store = TextStore::open(folder / "text-x");
  const std::vector<int64_t> soon = {3};
  EXPECT_NO_THROW(store->prefetch(soon));
  for (const int64_t whole : {0, 1, 2}) EXPECT_NO_THROW(store->rows(whole)) << whole;
  for (int read = 0; read < 2; ++read)
    EXPECT_ERROR(store->rows(3), "caption \"green\" is damaged", "features-00001");
  EXPECT_THAT(find_text_store_problems(folder / "text-x"), ElementsAre(HasSubstr("features-00001")));
}

TEST(HardeningHigh1, CaptionsAndColumnsAreComparedWhenTheStoreIsOpened) {
  const TempFolder folder;
  write_text_store(folder / "text-x");
  write_text_store(folder / "text-y");
  flip_byte(folder / "text-x/captions.safetensors", "an apple", 3);
  EXPECT_ERROR(TextStore::open(folder / "text-x"), "captions.safetensors", "checksum is another");
  // A shard of the same captions and encoder whose features are others.
  TextStoreWriter other(folder / "text-z", kInfo, small_table());
  std::vector<uint16_t> zeros(3 * kWidth);
  other.write_shard(0, std::vector<int64_t>{1, 2}, std::as_bytes(std::span(zeros)), 0);
  std::filesystem::copy_file(folder / "text-z/features-00000.safetensors",
                             folder / "text-y/features-00000.safetensors",
                             std::filesystem::copy_options::overwrite_existing);
  EXPECT_ERROR(TextStore::open(folder / "text-y"), "features-00000", "exchanged");
}

TEST(HardeningHigh1, ATextStoreOfAnEarlierVersionOpens) {
  const TempFolder folder;
  write_text_store(folder / "text-x");
  remove_new_checksums(folder / "text-x");
  const auto store = TextStore::open(folder / "text-x", /*verify=*/true);
  EXPECT_TRUE(store->info().columns_xxh3.empty());
  EXPECT_EQ(static_cast<int64_t>(store->rows(3).size()), rows_of_entry(3) * kWidth * 2);
}

TEST(TextStore, BrokenTextJsonIsOneLine) {
  const TempFolder folder;
  write_text_store(folder / "text-x");
  const std::string good = test::read_bytes(folder / "text-x/text.json");
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return message_of([&] { parse_text_store_info(text.replace(at, from.size(), to), "x"); });
  };
  EXPECT_THAT(with("\"format_version\": 1", "\"format_version\": 2"), HasSubstr("update Kiln"));
  EXPECT_THAT(with("\"width\": 3", "\"width\": 0"), HasSubstr("\"width\" from 1"));
  EXPECT_THAT(with("\"dtype\": \"BF16\"", "\"dtype\": \"I64\""), HasSubstr("F32, BF16 or F16"));
  EXPECT_THAT(with("\"num_entries\": 4", "\"num_entries\": 9"), HasSubstr("expected 5 shards"));
  EXPECT_ERROR(parse_text_store_info("[", "x"), "JSON object");
  EXPECT_ERROR(TextStore::open(folder / "text-y"), "holds no text.json");
}

TEST(CaptionTable, RefusesImpossibleWeights) {
  CaptionTable table;
  EXPECT_ERROR(table.add_sample("a", std::vector<Caption>{{.text = "x", .weight = -1}}), "at least 0");
  EXPECT_ERROR(table.add_sample("a", std::vector<Caption>{{.text = "x", .weight = 0}}),
               "all weights of a are 0");
}

}  // namespace
}  // namespace kiln
