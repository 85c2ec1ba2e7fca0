#include "core/text/yaml.h"

#include "test_files.h"

namespace kiln {
namespace {

using nlohmann::json;

std::string refusal(const std::string& text) {
  return test::message_of([&] { parse_yaml("recipe", text, "c.yaml"); });
}

TEST(Yaml, ScalarsHaveTheirTypes) {
  const json read = parse_yaml("recipe", R"(
a: 1
b: 1.0e-4
c: [0.9, 1e-30, .5, 1.]
d: true
e: no
f: "1"
g:
h: ~
i: {x: null, y: 'it''s'}   # flow style
j:
  - silu
  -
k: 1.2.3
l: -3
)",
                               "c.yaml");
  EXPECT_EQ(read,
            json::parse(R"({"a": 1, "b": 1.0e-4, "c": [0.9, 1e-30, 0.5, 1.0], "d": true, "e": "no", "f": "1",
                                  "g": null, "h": null, "i": {"x": null, "y": "it's"}, "j": ["silu", null],
                                  "k": "1.2.3", "l": -3})"));
  EXPECT_EQ(parse_yaml("recipe", "", "c.yaml"), json::object());
  EXPECT_EQ(parse_yaml("recipe", "a:\n\xC2\xA0 b: 1\r\n", "c.yaml"), json::parse(R"({"a": {"b": 1}})"));
  EXPECT_EQ(parse_yaml("recipe", R"({"a": [1]})", "c.json"), json::parse(R"({"a": [1]})"));
}

TEST(Yaml, WhatIsNoConfigNamesItsLine) {
  EXPECT_THAT(refusal("a: 1\nb: [1, 2\n"), HasSubstr("c.yaml line 3"));
  EXPECT_THAT(refusal("a: 1\nb: 2\na: 3\n"), HasSubstr("c.yaml line 3 gives a a second time"));
  EXPECT_THAT(refusal("- a\n"), HasSubstr("line 1 is no \"key: value\""));
  EXPECT_THAT(refusal("a 1\n"), HasSubstr("line 1 is no \"key: value\""));
  EXPECT_THAT(refusal("{[1]: 2}\n"), HasSubstr("a key that is no word"));
}

TEST(Yaml, HugeAndDeepFilesAreRefused) {
  std::string deep = "a: ";
  deep += std::string(100, '[') + std::string(100, ']');
  EXPECT_THAT(refusal(deep), HasSubstr("16 levels"));
  EXPECT_NE(refusal("a: " + std::string(100'000, '[')), "");
  EXPECT_THAT(refusal("a: " + std::string(2'000'000, 'x')), HasSubstr("bytes"));
  std::string laughs = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n";
  for (int level = 1; level < 10; ++level) {
    laughs += fmt::format("a{0}: &a{0} [", level);
    for (int copy = 0; copy < 10; ++copy) laughs += fmt::format("*a{},", level - 1);
    laughs += "]\n";
  }
  EXPECT_THAT(refusal(laughs), HasSubstr("20000 values"));
}

}  // namespace
}  // namespace kiln
