#include "core/text/json_text.h"

#include <sys/stat.h>

#include "test_files.h"

namespace kiln {
namespace {

using nlohmann::json;

std::string levels(size_t count, const std::string& begin, const std::string& end) {
  std::string text;
  for (size_t i = 0; i < count; ++i) text += begin;
  text += "1";
  for (size_t i = 0; i < count; ++i) text += end;
  return text;
}

TEST(JsonText, ParsesWhatNlohmannParses) {
  for (const char* text :
       {"null", "true", "-1", "18446744073709551615", "1.5e3", "\"a\\u00e4\\n\"", "[]", "{}", "[[], {}, [1]]",
        R"({"a": [1, {"b": null}], "c": {"d": [[2]], "e": "f"}, "a": 3})", "", "{", "[1,]", "{\"a\"}", "1 2",
        "nul"}) {
    const json own = json_or_discarded("test", text, "text"), other = json::parse(text, nullptr, false);
    EXPECT_EQ(own.is_discarded(), other.is_discarded()) << text;
    if (!other.is_discarded()) {
      EXPECT_EQ(own, other) << text;
    }
  }
  EXPECT_EQ(parse_json("test", "{/* why */ \"a\": 1}", "text", {.ignores_comments = true}), json({{"a", 1}}));
}

TEST(Json, IntegersAreReadWithinTheirRange) {
  for (const char* text : {"-1e92", "1e92", "9223372036854775808", "9223372036854775808.0"})
    EXPECT_THROW(json::parse(text).get<int64_t>(), json::out_of_range) << text;
  for (const char* text : {"-1", "256", "256.0", "1e3"})
    EXPECT_THROW(json::parse(text).get<uint8_t>(), json::out_of_range) << text;
  EXPECT_THROW(json({{"size", 1e92}}).value("size", int64_t{0}), json::out_of_range);
  EXPECT_THROW(json::parse("[1, 1e92]").get<std::vector<int>>(), json::out_of_range);
  EXPECT_THROW(json("1").get<int>(), json::type_error);
  EXPECT_EQ(json::parse("-9223372036854775808.0").get<int64_t>(), INT64_MIN);
  EXPECT_EQ(json::parse("18446744073709551615").get<uint64_t>(), UINT64_MAX);
  EXPECT_EQ(json::parse("4.7").get<int>(), 4);
  EXPECT_EQ(json::parse("-0.5").get<uint8_t>(), 0);
  EXPECT_TRUE(is_integer(json(-1)) && is_integer<uint8_t>(json(255)));
  for (const char* text : {"-1", "256", "1.0", "true", "\"1\"", "null"})
    EXPECT_FALSE(is_integer<uint8_t>(json::parse(text))) << text;
}

TEST(JsonText, Finding8DepthAndCountsAreLimited) {
  for (const std::string begin : {"[", "{\"a\":"}) {
    const std::string end = begin == "[" ? "]" : "}";
    EXPECT_TRUE(json_or_discarded("test", levels(kMostJsonLevels, begin, end), "text").is_structured());
    for (const size_t count : {kMostJsonLevels + 1, size_t{300'000}})
      EXPECT_ERROR(json_or_discarded("test", levels(count, begin, end), "x.json"),
                   "[test] x.json has more than 64 nested levels");
  }
  EXPECT_ERROR(parse_json("test", "[1, 2, 3]", "x.json", {.most_values = 3}),
               "x.json has more than 3 values");
  EXPECT_ERROR(parse_json("test", "[1, 2, 3]", "x.json", {.most_bytes = 8}),
               "x.json has 9 bytes of JSON, at most 8");
}

TEST(JsonText, WhatIsNoJsonIsNamed) {
  EXPECT_ERROR(parse_json("test", "{", "x.json"), "[test] x.json is not JSON: ");
  EXPECT_ERROR(parse_json("test", R"({"a": {"b": 1, "b": 2}})", "x", {.refuses_duplicates = true}),
               "key \"b\" occurs twice (x)");
}

TEST(JsonText, ReadsPastOtherKeys) {
  const std::string text = R"({"vocab": {"a": [1, {"keep": 2}]}, "keep": [{"vocab": 3}], "more": [[4]]})";
  EXPECT_EQ(parse_json("test", text, "text", {.only_key = "keep"}),
            json::parse(R"({"keep": [{"vocab": 3}]})"));
}

TEST(JsonText, Finding17APipeIsNotWaitedFor) {
  const TempFolder folder;
  ASSERT_EQ(::mkfifo((folder / "config.json").c_str(), 0600), 0);
  EXPECT_ERROR(read_json_file("test", folder / "config.json"), "config.json: expected a file");
}

TEST(JsonText, Finding19NoMessageIsLongOrRaw) {
  EXPECT_EQ(brief(json({{"a", 1}})), R"({"a":1})");
  EXPECT_LT(brief(json(std::string(100'000, 'x'))).size(), 200u);
  EXPECT_LT(kiln::message_of(Error("[test] " + std::string(100'000, 'x'))).size(), 5'000u);
  EXPECT_EQ(kiln::message_of(std::bad_alloc()), "there is not enough memory for what was asked");
}

}  // namespace
}  // namespace kiln
