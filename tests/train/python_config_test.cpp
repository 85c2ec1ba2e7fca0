#include "interop/foreign_recipe.h"

#include "test_files.h"

namespace kiln {
namespace {

using nlohmann::json;

std::string refusal(const std::string& text) {
  return test::message_of([&] { parse_python_config(text, "p.py"); });
}

TEST(PythonConfig, AssignmentsAreRead) {
  const json read = parse_python_config(
      "# a config\na = 1\nb = -2.5e-3 # rate\nc = 'x' \"y\"\nd = [a, None, True,\n     (1, 2),]\n"
      "e = dict(k={'z': .5}, l=())\nf = (3)\ng = 1_000\n\n",
      "p.py");
  EXPECT_EQ(read, json::parse(R"({"a": 1, "b": -0.0025, "c": "xy", "d": [1, null, true, [1, 2]],
                                  "e": {"k": {"z": 0.5}, "l": []}, "f": 3, "g": 1000})"));
}

TEST(PythonConfig, DictsAreMergedIntoThoseOfTheBase) {
  const json base = json::parse(R"({"a": {"k": 1, "l": {"m": 2, "n": 3}}, "b": {"x": 1}, "c": 4})"),
             config =
                 json::parse(R"({"a": {"l": {"n": 5}}, "b": {"_delete_": true, "y": 2}, "d": {"z": 6}})");
  EXPECT_EQ(inherit_python_config(base, config),
            json::parse(R"({"a": {"k": 1, "l": {"m": 2, "n": 5}}, "b": {"y": 2}, "c": 4, "d": {"z": 6}})"));
}

TEST(PythonConfig, StringsKeepTheirEscapes) {
  EXPECT_EQ(parse_python_config("a = 'x\\n\\'y\\\\z\\d'\n", "p.py").at("a"), "x\n'y\\z\\d");
}

TEST(PythonConfig, NothingElseIs) {
  for (const char* text :
       {"import os\n", "a = 1 + 2\n", "a = f(1)\n", "a = b\n", "if a:\n  b = 1\n", "a == 1\n", "a = 'x\n",
        "a = [1\n", "a = dict(1=2)\n", "  a = 1\n", "a = 1 b = 2\n", "a.b = 1\n", "a = 1.2.3\n",
        "a = [1 2]\n", "a = '\\x41'\n", "a = {1: 2}\n", "a = __import__('os')\n"})
    EXPECT_THAT(refusal(std::string("x = 1\n") + text), HasSubstr("p.py line ")) << text;
  EXPECT_THAT(refusal("x = 1\nimport os\n"), HasSubstr("p.py line 2"));
  EXPECT_THAT(refusal("x = " + std::string(100'000, '[')), HasSubstr("line 1"));
}

TEST(PythonConfig, AStatementGoesOnInTheNextLineOnlyInBrackets) {
  for (const char* text : {"a =\n1\n", "a\n= 1\n", "a = 'x'\n'y'\n"})
    EXPECT_THAT(refusal(text), HasSubstr("p.py line ")) << text;
}

}  // namespace
}  // namespace kiln
