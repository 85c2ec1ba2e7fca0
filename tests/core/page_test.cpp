// Pages: what they hold, and that no text leaves its place in the file.
#include "core/page/page.h"

#include <algorithm>
#include <limits>

#include "page_data.h"
#include "test_files.h"

namespace kiln {
namespace {

using Json = nlohmann::json;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

size_t count_of(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != text.npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(Page, HoldsItsPartsInTheirOrder) {
  Page page("a run");
  page.text("said", "finding");
  page.section("Settings");
  page.row("lr", "0.1");
  page.row("model", "dit");
  page.text("between");
  page.row("seed", "3");
  page.table({"run", "loss"}, {{"a", "0.1"}, {"b", "-"}}, "losses");
  page.picture("a.png", "a bird", 4);
  EXPECT_EQ(page.json(), Json::parse(R"({"title": "a run", "sections": [
    {"title": "", "parts": [{"kind": "text", "text": "said", "tone": "finding"}]},
    {"title": "Settings", "parts": [
      {"kind": "rows", "items": [["lr", "0.1"], ["model", "dit"]]},
      {"kind": "text", "text": "between", "tone": ""},
      {"kind": "rows", "items": [["seed", "3"]]},
      {"kind": "table", "title": "losses", "columns": ["run", "loss"], "rows": [["a", "0.1"], ["b", "-"]]},
      {"kind": "pictures", "items": [["a.png", "a bird", 4]]}]}]})"));
}

TEST(Page, ListsOfTwoSectionsStayApart) {
  Page page("p");
  page.section("Advice");
  page.item("a");
  page.section("Disk");
  page.item("b");
  EXPECT_EQ(test::parts_of(page.json(), "list").size(), 2u);
}

TEST(Page, LeavesOutWhatHoldsNothing) {
  Page page("empty");
  page.section("Nothing");
  page.text("");
  page.table({"run"}, {});
  page.plot({.title = "no point"}, {{.points = {{0, kNan}}}, {}});
  page.section("Still nothing");
  EXPECT_EQ(page.json().at("sections"), Json::array());
}

TEST(Page, LongSeriesAreThinnedToMeansAndWhatIsNotFiniteIsLeftOut) {
  PlotSeries series{.name = "loss"};
  for (int i = 0; i < 20000; ++i) series.points.push_back({double(i), i % 7 == 0 ? kNan : i / 3.0});
  Page page("p");
  page.plot({.title = "t", .log_y = true}, {series});
  const Json drawn = test::parts_of(page.json(), "plot").at(0).at("series").at(0);
  ASSERT_EQ(drawn.at("x").size(), 600u);
  double sum = 0;
  for (size_t i = 0; i < 600; ++i) {
    EXPECT_NEAR(drawn.at("y").at(i).get<double>(), drawn.at("x").at(i).get<double>() / 3, 0.01);
    sum += drawn.at("y").at(i).get<double>() / 600;
  }
  EXPECT_NEAR(sum, 20000 / 6.0, 5);
  EXPECT_LT(page.json().dump().size(), 15000u) << "in no more digits than a picture shows";
}

TEST(Page, AreasOfAStackKeepTheirCommonX) {
  Page page("p");
  page.plot({.title = "t"}, {{.name = "a", .points = {{0, 1}, {1, kNan}, {2, 3}}, .stacked = true}});
  const Json drawn = test::parts_of(page.json(), "plot").at(0).at("series").at(0);
  EXPECT_EQ(drawn.at("x"), Json({0.0, 1.0, 2.0}));
  EXPECT_EQ(drawn.at("y"), Json({1.0, 0.0, 3.0}));
}

TEST(Page, NoTextLeavesItsPlaceInTheFile) {
  const std::string hostile =
      "</script><img src=x onerror=alert(1)><!--<script>]]>&quot;\"\\ @DATA@ \xE2\x80\xA8\xE2\x80\xA9"  // line
                                                                                                        // ends
      "\xE2\x80\xAE"             // right to left
      "\x01\x1B[2J\x7F\xC2\x85"  // control characters
      "Vogel \xC3\xBC";
  Page page(hostile);
  page.row(hostile, hostile + "\xFF");  // not UTF-8
  page.plot({.title = hostile}, {{.name = hostile, .points = {{1, 2}}}});
  const std::string html = page.html(), text = test::data_text(html);
  EXPECT_THAT(text, Not(HasSubstr("<")));
  EXPECT_TRUE(std::ranges::all_of(text, [](char c) { return c == '\n' || (c >= 0x20 && c < 0x7F); })) << text;
  EXPECT_EQ(count_of(html, "</script>"), count_of(Page("plain").html(), "</script>"));
  const Json data = Json::parse(text);
  EXPECT_EQ(data.at("title"), hostile);
  const Json row = test::parts_of(data, "rows").at(0).at("items").at(0);
  EXPECT_EQ(row, Json({hostile, hostile + "\xEF\xBF\xBD"}));
}

// What is loaded from elsewhere would need an address.
TEST(Page, LoadsNothing) {
  const std::string html = Page("plain").html();
  EXPECT_EQ(count_of(html, "http"), 1u) << "http-equiv";
  EXPECT_THAT(html, HasSubstr("default-src 'none'"));
  EXPECT_THAT(html, Not(HasSubstr("innerHTML")));
  EXPECT_THAT(html, Not(HasSubstr("@DATA@")));
}

TEST(Page, PicturesAreEmbeddedInBase64) {
  EXPECT_EQ(embedded(""), "data:image/png;base64,");
  EXPECT_EQ(embedded("png0"), "data:image/png;base64,cG5nMA==");
  EXPECT_EQ(embedded("png29"), "data:image/png;base64,cG5nMjk=");
  EXPECT_EQ(embedded("\xFF\xFE\xFD"), "data:image/png;base64,//79");
}

}  // namespace
}  // namespace kiln
