// Line plots as inline SVG.
#pragma once
#include <string>
#include <vector>

#include "core/text/html.h"

namespace kiln {

struct PlotPoint {
  double x = 0, y = 0;
};
struct PlotSeries {
  std::string name;   // in the legend; empty: not listed
  std::string color;  // CSS
  std::vector<PlotPoint> points;
  bool faint = false;   // drawn thin behind the others
  bool filled = false;  // filled down to the x axis; put the higher series of a stack first
};
struct PlotTick {
  double x = 0;
  std::string name;
};
// Along x are whole numbers, such as steps, unless there are ticks.
struct PlotOptions {
  std::string title, x_label;
  bool log_y = false;               // linear if a value is not positive
  bool from_zero = false;           // the y axis begins at 0
  std::vector<PlotTick> x_ticks{};  // replace the numbers
};

// Returns a plot as SVG. Leaves out non-finite points and thins long series to the width of the picture.
std::string line_plot(const PlotOptions& options, const std::vector<PlotSeries>& series);

// Returns axis positions at 1, 2 or 5 times a power of ten, about `count` of them within [low, high].
std::vector<double> nice_ticks(double low, double high, int count);

}  // namespace kiln
