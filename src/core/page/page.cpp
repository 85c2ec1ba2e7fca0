#include "core/page/page.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "core/files/text_file.h"

namespace kiln {

const char* page_template();  // page.html; CMake makes a source of it

namespace {

using Json = nlohmann::json;

constexpr size_t kMostPoints = 600;  // of a series; a plot is about as many pixels wide

// Returns a value without the digits that no plot can show.
double shortened(double value) { return std::strtod(fmt::format("{:.7g}", value).c_str(), nullptr); }

Json series_json(const PlotSeries& series) {
  std::vector<PlotPoint> points;
  for (PlotPoint point : series.points) {
    if (series.stacked && !std::isfinite(point.y)) point.y = 0;  // what lies above it has this x too
    if (std::isfinite(point.x) && std::isfinite(point.y)) points.push_back(point);
  }
  Json x = Json::array(), y = Json::array();
  const size_t count = std::min(points.size(), kMostPoints);
  for (size_t i = 0; i < count; ++i) {  // the mean of each of equal runs of points
    const size_t begin = i * points.size() / count, end = (i + 1) * points.size() / count;
    PlotPoint mean;
    for (size_t j = begin; j < end; ++j) {
      mean.x += points[j].x / static_cast<double>(end - begin);
      mean.y += points[j].y / static_cast<double>(end - begin);
    }
    x.push_back(shortened(mean.x));
    y.push_back(shortened(mean.y));
  }
  return {{"name", series.name},       {"color", series.color}, {"faint", series.faint},
          {"stacked", series.stacked}, {"x", std::move(x)},     {"y", std::move(y)}};
}

}  // namespace

Page::Page(const std::string& title) : data_{{"title", title}, {"sections", Json::array()}} {}

// Begins a part of this kind.
Json& Page::add(const char* kind) {
  Json& sections = data_["sections"];
  if (next_section_) sections.push_back({{"title", *next_section_}, {"parts", Json::array()}});
  next_section_.reset();
  return sections.back()["parts"].emplace_back(Json::object({{"kind", kind}}));
}

void Page::add_to(const char* kind, const Json& item) {
  const bool continues = !next_section_ && data_["sections"].back()["parts"].back().at("kind") == kind;
  Json& list = continues ? data_["sections"].back()["parts"].back() : add(kind);
  list["items"].push_back(item);
}

void Page::text(const std::string& text, const char* tone) {
  if (!text.empty()) add("text").update({{"text", text}, {"tone", tone}});
}

void Page::table(const std::vector<std::string>& columns, const std::vector<std::vector<std::string>>& rows,
                 const std::string& title) {
  if (!rows.empty()) add("table").update({{"title", title}, {"columns", columns}, {"rows", rows}});
}

void Page::plot(const PlotOptions& options, const std::vector<PlotSeries>& series) {
  Json drawn = Json::array();
  bool has_points = false;
  for (const PlotSeries& one : series) {
    drawn.push_back(series_json(one));
    has_points = has_points || !drawn.back().at("x").empty();
  }
  if (!has_points) return;
  add("plot").update({{"title", options.title},
                      {"x_label", options.x_label},
                      {"log_y", options.log_y},
                      {"from_zero", options.from_zero},
                      {"x_ticks", options.x_ticks},
                      {"series", std::move(drawn)}});
}

void Page::append(const Page& other) {
  for (const Json& section : other.data_.at("sections")) data_["sections"].push_back(section);
  next_section_ = "";
}

std::string Page::html() const { return page_html(data_); }

// In ASCII only "<" begins what HTML reads in a script element ("</script>", "<!--"), and neither line ends
// of JavaScript nor characters that turn the direction of text are left.
std::string page_json(const Json& json) {
  return replaced(json.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace), "<", "\\u003c");
}

std::string page_html(const Json& data, std::optional<int64_t> since) {
  std::string sections;  // one a line, for whoever reads the file itself
  for (const Json& section : data.at("sections"))
    sections += (sections.empty() ? "\n" : ",\n") + page_json(section);
  return replaced(replaced(page_template(), "@CONNECT@", since ? " connect-src 'self';" : ""), "@DATA@",
                  fmt::format("{{\"title\":{},{}\"sections\":[{}\n]}}", page_json(data.at("title")),
                              since ? fmt::format("\"since\":{},", *since) : "", sections));
}

std::string embedded(std::string_view png) {
  static constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text = "data:image/png;base64,";
  for (size_t i = 0; i < png.size(); i += 3) {
    uint32_t group = 0;
    for (size_t j = i; j < i + 3; ++j)
      group = group << 8 | (j < png.size() ? static_cast<uint8_t>(png[j]) : 0u);
    for (size_t j = 0; j < 4; ++j) text += i + j <= png.size() ? kDigits[group >> (18 - 6 * j) & 63] : '=';
  }
  return text;
}

}  // namespace kiln
