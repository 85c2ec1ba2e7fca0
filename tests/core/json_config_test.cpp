#include "core/json_config.h"

#include "test_files.h"

namespace kiln {
namespace {

using nlohmann::json;

TEST(JsonConfig, AbsentAndNullAreTheDefault) {
  const json text = {{"null", nullptr}};
  const JsonConfig config("test", text);
  for (const char* key : {"null", "absent"}) {
    EXPECT_FALSE(config.has(key));
    EXPECT_EQ(config.get<int64_t>(key, 7), 7);
    EXPECT_EQ(config.get(key, std::vector<double>{0.5}), std::vector<double>{0.5});
    EXPECT_EQ(config.object(key), json::object());
    EXPECT_ERROR(config.require<double>(key), "to be a number, got none");
  }
}

TEST(JsonConfig, ReadsEveryKind) {
  const json text = {{"b", true},        {"i", -3},        {"whole", 4.0},   {"d", 0.25},
                     {"number", 2},      {"s", "text"},    {"is", {1, 2.0}}, {"ds", {1, 0.5}},
                     {"ss", {"a", "b"}}, {"o", {{"k", 1}}}};
  const JsonConfig config("test", text);
  EXPECT_TRUE(config.get("b", false));
  EXPECT_EQ(config.require<int64_t>("i"), -3);
  EXPECT_EQ(config.require<int64_t>("whole"), 4);
  EXPECT_EQ(config.require<double>("d"), 0.25);
  EXPECT_EQ(config.require<double>("number"), 2);
  EXPECT_EQ(config.get<std::string>("s", ""), "text");
  EXPECT_EQ(config.require<std::vector<int64_t>>("is"), (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(config.require<std::vector<double>>("ds"), (std::vector<double>{1, 0.5}));
  EXPECT_EQ(config.require<std::vector<std::string>>("ss"), (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(config.object("o").at("k"), 1);
}

TEST(JsonConfig, NamesTheKeyAndWhatCame) {
  const json text = {
      {"a", "3"}, {"half", 2.5}, {"big", 1e300}, {"huge", 18446744073709551615u}, {"l", {1, "x"}}};
  const JsonConfig config("test", text);
  EXPECT_EQ(message_of([&] { config.get<int64_t>("a", 0); }),
            "[test] expected a to be an integer, got \"3\"");
  for (const char* key : {"half", "big", "huge"})
    EXPECT_ERROR(config.get<int64_t>(key, 0), "to be an integer, got");
  EXPECT_ERROR(config.get("a", 0.0), "to be a number");
  EXPECT_ERROR(config.get("a", false), "to be true or false");
  EXPECT_ERROR(config.get("half", std::string()), "to be a string");
  EXPECT_ERROR(config.require<std::vector<double>>("l"), "to be a list of numbers");
  EXPECT_ERROR(config.object("l"), "to be an object");
  EXPECT_ERROR(config.positive("absent", 0), "at least 1, got 0");
  EXPECT_ERROR(config.choice("a", "", {"x", "y"}), "one of x, y, got \"3\"");
  EXPECT_ERROR(config.refuse("a", "4"), "not implemented: expected \"4\"");
  const json list = {1, 2};
  EXPECT_ERROR(JsonConfig("test", list), "expected a JSON object, got [1,2]");
}

TEST(JsonConfig, NamesKeysThatNobodyReads) {
  const json text = {{"read", 1}, {"_comment", "any"}, {"lr_", 1}, {"x", 2}};
  const JsonConfig config("test", text);
  config.get<int64_t>("read", 0);
  config.get<int64_t>("absent", 0);
  EXPECT_EQ(message_of([&] { config.refuse_unknown(); }),
            "[test] unknown config keys: lr_, x; the nearest known ones are read, absent");
}

TEST(JsonConfig, FeaturesOfOthersThatAreOffPassButNoMistypedName) {
  const json text = {{"qk_norm", false}, {"shift_terminal", nullptr}, {"learn_sgima", false}, {"amp", true}};
  const JsonConfig config("test", text);
  config.get("learn_sigma", true);
  EXPECT_EQ(message_of([&] { config.refuse_unknown(); }),
            "[test] unknown config keys: amp, learn_sgima; the nearest known ones are learn_sigma");
}

TEST(JsonConfig, AnOptionIsTextOrAFile) {
  const test::TempFolder folder;
  const std::string path = (folder.path() / "config.json").string();
  std::ofstream(path) << "{\"depth\": 3}";
  const json expected = {{"depth", 3}};
  EXPECT_EQ(read_json_option("test", "--config", path), expected);
  EXPECT_EQ(read_json_option("test", "--config", "{\"depth\": 3}"), expected);
  EXPECT_EQ(read_json_option("test", "--config", ""), json::object());
  for (const std::string& bad : {std::string("[1]"), std::string("{"), path + "x"})
    EXPECT_ERROR(read_json_option("test", "--config", bad), "--config expects a JSON object or a file of one",
                 bad);
}

}  // namespace
}  // namespace kiln
