#include "core/toml.h"

#include <cmath>

#include "test_files.h"

namespace kiln {
namespace {

nlohmann::json value_of(const std::string& text) { return parse_toml("key = " + text, "test").at(0).value; }

TEST(Toml, ReadsEveryKindOfValue) {
  EXPECT_EQ(value_of("\"a # \\\"b\\\" \\\\ \\n\" # comment"), "a # \"b\" \\ \n");
  EXPECT_EQ(value_of("'C:\\dir'"), "C:\\dir");
  EXPECT_EQ(value_of("-12"), -12);
  EXPECT_EQ(value_of("1_000_000"), 1000000);
  EXPECT_TRUE(value_of("7").is_number_integer());
  EXPECT_EQ(value_of("9223372036854775807"), 9223372036854775807);
  EXPECT_EQ(value_of("1e-4"), 1e-4);
  EXPECT_EQ(value_of("+0.5"), 0.5);
  EXPECT_TRUE(std::isinf(value_of("-inf").get<double>()));
  EXPECT_EQ(value_of("true"), true);
  EXPECT_EQ(value_of("[1, 2.5,\n  # more\n  \"x\",\n]"), nlohmann::json({1, 2.5, "x"}));
  EXPECT_EQ(value_of("[]"), nlohmann::json::array());
}

TEST(Toml, KeepsOrderAndLines) {
  const auto entries = parse_toml("# recipe\r\nb = 1\r\n\n\"a\" = [\n1]\nc-d_9 = false", "test");
  ASSERT_EQ(entries.size(), 3u);
  EXPECT_EQ(entries[0].key, "b");
  EXPECT_EQ(entries[1].key, "a");
  EXPECT_EQ(entries[1].line, 4);
  EXPECT_EQ(entries[2].key, "c-d_9");
  EXPECT_EQ(entries[2].line, 6);
  EXPECT_TRUE(parse_toml("", "test").empty());
}

TEST(Toml, ReadsTablesInTheirOrder) {
  const test::TempFolder folder;
  test::write_bytes(folder / "variants.toml",
                    "b = 1\na = 2\n[second]\nx = \"y\"\n[first]\n[third]\nd = 1\nc = [2]\n");
  const std::vector<TomlTable> tables = read_toml_tables(folder / "variants.toml");
  ASSERT_EQ(tables.size(), 4u);
  EXPECT_EQ(tables[0].name, "");
  ASSERT_EQ(tables[0].entries.size(), 2u);
  EXPECT_EQ(tables[0].entries[0].key, "b");
  EXPECT_EQ(tables[1].name, "second");
  EXPECT_EQ(tables[1].line, 3);
  EXPECT_EQ(tables[1].entries.at(0).value, "y");
  EXPECT_EQ(tables[2].name, "first");
  EXPECT_TRUE(tables[2].entries.empty());
  EXPECT_EQ(tables[3].entries.at(0).key, "d");
  EXPECT_EQ(tables[3].entries.at(1).line, 8);
  test::write_bytes(folder / "nested.toml", "[a]\n[a.b]\nc = 1\n");
  EXPECT_ERROR(read_toml_tables(folder / "nested.toml"), "tables are not supported here");
  test::write_bytes(folder / "list.toml", "[[a]]\nc = 1\n");
  EXPECT_ERROR(read_toml_tables(folder / "list.toml"), "list of tables");
}

TEST(Toml, RefusesTheRestByLine) {
  for (const auto& broken :
       std::vector<std::pair<std::string, std::string>>{{"a = 1\n[table]", "tables"},
                                                        {"a = 1\na = 2", "redefine"},
                                                        {"x = 0\na 1", "'='"},
                                                        {"x = 0\na =", "value"},
                                                        {"x = 0\na = 1 2", "saw '2'"},
                                                        {"x = 0\na = \"open", "string"},
                                                        {"x = 0\na = [1, 2", "array"},
                                                        {"x = 0\na = [[1]]", "expected"},
                                                        {"x = 0\n= 1", "key"},
                                                        {"x = 0\na = maybe", "value type"},
                                                        {"x = 0\na = \"\\q\"", "escape"},
                                                        {"x = 0\na = 1979-05-27", "expected"}})
    EXPECT_THAT([&] { parse_toml(broken.first, "recipe.toml"); },
                ThrowsMessage<Error>(has_all("recipe.toml line 2", broken.second)))
        << broken.first;
  for (const char* text : {"x = 0\n[[stage]]\nlr = 1", "x = 0\n[stage]\nlr = 1"})
    EXPECT_ERROR(parse_toml(text, "recipe.toml"), "recipe.toml line 2: tables are not supported");
  EXPECT_ERROR(read_toml("/absent.toml"), "cannot read /absent.toml: No such file");
  EXPECT_ERROR(read_toml("/"), "cannot read /: it is a folder");
}

TEST(Toml, TablesOfANameComeInTheirOrder) {
  const TomlDocument document =
      parse_toml_document("lr = 1\n[[stage]]\nepochs = 4\n\n[[other]]\n[[stage]]\nlr = 2\nsteps = 3", "test");
  ASSERT_EQ(document.entries.size(), 1u);
  ASSERT_EQ(document.tables.size(), 3u);
  EXPECT_EQ(document.tables[0].name, "stage");
  EXPECT_EQ(document.tables[0].entries.at(0).key, "epochs");
  EXPECT_EQ(document.tables[1].name, "other");
  EXPECT_EQ(document.tables[2].line, 6);
  EXPECT_EQ(document.tables[2].entries.at(1).value, 3);
  EXPECT_ERROR(parse_toml_document("[[stage]]\n[stage.data]\na = 1", "test"), "tables are not supported");
}

}  // namespace
}  // namespace kiln
