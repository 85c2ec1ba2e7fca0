// A page for people, in one file that a browser opens without a network: what stands on it, as JSON, inside
// the one template that draws it (page.html). Torch-free.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/json.h"

namespace kiln {

struct PlotPoint {
  double x = 0, y = 0;
};
struct PlotSeries {
  std::string name{};   // in the legend; empty: not listed
  std::string color{};  // CSS; empty: the template chooses by the place in the list
  std::vector<PlotPoint> points{};
  bool faint = false;    // a thin line
  bool stacked = false;  // an area upon those before it, which have the same x
};
// Along x are whole numbers, such as steps, unless there are ticks.
struct PlotOptions {
  std::string title{}, x_label = "step";
  bool log_y = false;                                     // linear if a value is not positive
  bool from_zero = false;                                 // the y axis begins at 0
  std::vector<std::pair<double, std::string>> x_ticks{};  // replace the numbers
};

// All texts may hold anything, from anybody: the page shows them as text.
class Page {
 public:
  explicit Page(const std::string& title);

  // What follows belongs to this section. A section to which nothing is added is left out.
  void section(const std::string& title) { next_section_ = title; }

  // Adds a paragraph, unless it is empty. `tone`: "verdict" is large, "finding" a warning.
  void text(const std::string& text, const char* tone = "");
  // These continue the list of their kind that was added last, or begin one. A figure has large digits.
  void figure(const std::string& value, const std::string& name) { add_to("figures", {value, name}); }
  void row(const std::string& name, const std::string& value) { add_to("rows", {name, value}); }
  void item(const std::string& text) { add_to("list", text); }
  // `source`: a path beside the page, or embedded(). `columns`: of the grid; 0: as many as fit.
  void picture(const std::string& source, const std::string& caption, int64_t columns = 0) {
    add_to("pictures", {source, caption, columns});
  }
  // Adds a table, unless it has no rows. One that follows a plot stands beside it where there is room.
  void table(const std::vector<std::string>& columns, const std::vector<std::vector<std::string>>& rows,
             const std::string& title = "");
  // Adds a plot, unless it has no finite point. Long series are thinned to the width of the picture.
  void plot(const PlotOptions& options, const std::vector<PlotSeries>& series);

  // Adds a part of a kind that a page has only while a program serves it (serve/run_pages.cpp).
  void part(const char* kind, const nlohmann::json& fields) { add(kind).update(fields); }
  // Adds the sections of another page.
  void append(const Page& other);

  // Returns {"title", "sections": [{"title", "parts": [{"kind", ...}]}]}.
  const nlohmann::json& json() const { return data_; }
  std::string html() const;

 private:
  nlohmann::json& add(const char* kind);
  void add_to(const char* kind, const nlohmann::json& item);

  nlohmann::json data_;
  std::optional<std::string> next_section_ = "";
};

// Returns the page of such JSON. With `since` it is a page that its program goes on to feed: it asks "events"
// beside it for sections that are newer, as PageFeed has them, and may send what its buttons stand for there.
// A page without it can reach nothing.
std::string page_html(const nlohmann::json& data, std::optional<int64_t> since = std::nullopt);

// Returns JSON in ASCII, without what could end a script element or mislead a reader.
std::string page_json(const nlohmann::json& json);

// Returns the bytes of a PNG file as a source of a picture, which the page then holds.
std::string embedded(std::string_view png);

}  // namespace kiln
