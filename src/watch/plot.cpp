#include "watch/plot.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.h"

namespace kiln {

namespace {

constexpr double kWidth = 640, kHeight = 280;
constexpr double kLeft = 62, kRight = 16, kTop = 34, kBottom = 40;
constexpr size_t kMaxPlotPoints = 600;  // per series

struct Axis {
  double low = 0, high = 1;
  bool log = false;
  double begin = 0, end = 0;  // pixels in the picture

  double operator()(double value) const {
    const auto warp = [this](double v) { return log ? std::log10(v) : v; };
    return begin + (warp(value) - warp(low)) / (warp(high) - warp(low)) * (end - begin);
  }
};

std::vector<PlotPoint> finite_points(const std::vector<PlotPoint>& points) {
  std::vector<PlotPoint> finite;
  for (const PlotPoint& point : points)
    if (std::isfinite(point.x) && std::isfinite(point.y)) finite.push_back(point);
  return finite;
}

// Replaces equal runs of points by their means if there are too many.
std::vector<PlotPoint> thinned(const std::vector<PlotPoint>& points) {
  if (points.size() <= kMaxPlotPoints) return points;
  std::vector<PlotPoint> means(kMaxPlotPoints);
  for (size_t i = 0; i < kMaxPlotPoints; ++i) {
    const size_t begin = i * points.size() / kMaxPlotPoints, end = (i + 1) * points.size() / kMaxPlotPoints;
    for (size_t j = begin; j < end; ++j) {
      means[i].x += points[j].x / static_cast<double>(end - begin);
      means[i].y += points[j].y / static_cast<double>(end - begin);
    }
  }
  return means;
}

std::vector<double> log_ticks(double low, double high) {
  std::vector<double> ticks;
  const bool wide = high / low > 50;
  for (int exponent = static_cast<int>(std::floor(std::log10(low))); exponent <= std::ceil(std::log10(high));
       ++exponent)
    for (double factor : {1.0, 2.0, 5.0}) {
      const double tick = factor * std::pow(10.0, exponent);
      if (tick >= low && tick <= high && (factor == 1 || !wide)) ticks.push_back(tick);
    }
  constexpr size_t kFewest = 3;  // fewer do not show how the axis is spaced
  return ticks.size() < kFewest ? nice_ticks(low, high, 5) : ticks;
}

std::string tick_text(double value) {
  const double size = std::abs(value);
  if (size < 1e-12) return "0";  // multiples of a stride may miss 0 by a rounding
  if (size >= 1e6) return fmt::format("{:g}M", value / 1e6);
  if (size >= 1e4) return fmt::format("{:g}k", value / 1e3);
  return fmt::format("{:.4g}", value);
}

std::string polyline(const PlotSeries& series, const Axis& x, const Axis& y) {
  if (series.points.size() == 1)  // a line of one point would be nothing
    return fmt::format(R"(<circle cx="{:.1f}" cy="{:.1f}" r="3" fill="{}"/>)", x(series.points[0].x),
                       y(series.points[0].y), series.color);
  std::string points;
  for (const PlotPoint& point : series.points)
    points += fmt::format("{:.1f},{:.1f} ", x(point.x), y(point.y));
  if (series.filled && !series.points.empty())
    return fmt::format(R"(<polygon points="{:.1f},{:.1f} {}{:.1f},{:.1f}" fill="{}"/>)",
                       x(series.points.front().x), y.begin, points, x(series.points.back().x), y.begin,
                       series.color);
  return fmt::format(R"(<polyline points="{}" fill="none" stroke="{}" stroke-width="{}" stroke-opacity="{}" )"
                     R"(stroke-linejoin="round"/>)",
                     points, series.color, series.faint ? 1 : 2, series.faint ? 0.35 : 1);
}

std::string legend(const std::vector<PlotSeries>& series) {
  std::string svg;
  double right = kWidth - kRight;
  for (auto entry = series.rbegin(); entry != series.rend(); ++entry) {
    if (entry->name.empty()) continue;
    const double width = 7.0 * static_cast<double>(entry->name.size());
    svg += fmt::format(R"(<text x="{:.1f}" y="20" class="legend">{}</text>)", right - width,
                       escape(entry->name));
    svg += fmt::format(R"(<rect x="{:.1f}" y="11" width="10" height="10" rx="2" fill="{}"/>)",
                       right - width - 15, entry->color);
    right -= width + 30;
  }
  return svg;
}

std::string frame(const PlotOptions& options, const Axis& x, const Axis& y) {
  std::string svg =
      fmt::format(R"(<text x="{}" y="20" class="title">{}</text>)", kLeft - 46, escape(options.title));
  for (double tick : y.log ? log_ticks(y.low, y.high) : nice_ticks(y.low, y.high, 5))
    svg += fmt::format(R"(<line x1="{0}" x2="{1}" y1="{2:.1f}" y2="{2:.1f}" class="grid"/>)"
                       R"(<text x="{3}" y="{4:.1f}" class="tick" text-anchor="end">{5}</text>)",
                       kLeft, kWidth - kRight, y(tick), kLeft - 8, y(tick) + 4, tick_text(tick));
  std::vector<PlotTick> ticks = options.x_ticks;
  if (ticks.empty())
    for (double tick : nice_ticks(x.low, x.high, 6))
      if (tick == std::round(tick)) ticks.push_back({tick, tick_text(tick)});
  for (const PlotTick& tick : ticks)
    svg += fmt::format(R"(<text x="{:.1f}" y="{}" class="tick" text-anchor="middle">{}</text>)", x(tick.x),
                       kHeight - kBottom + 18, escape(tick.name));
  return svg + fmt::format(R"(<text x="{}" y="{}" class="tick" text-anchor="middle">{}</text>)",
                           (kLeft + kWidth - kRight) / 2, kHeight - 6, escape(options.x_label));
}

}  // namespace

std::vector<double> nice_ticks(double low, double high, int count) {
  if (!(high > low)) return {low};
  const double rough = (high - low) / count;
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  double stride = 10 * power;
  for (double factor : {1.0, 2.0, 5.0})
    if (factor * power >= rough) {
      stride = factor * power;
      break;
    }
  std::vector<double> ticks;
  for (double i = std::ceil(low / stride - 1e-9); i * stride <= high + 1e-9 * stride; ++i)
    ticks.push_back(i * stride);
  return ticks;
}

std::string line_plot(const PlotOptions& options, const std::vector<PlotSeries>& series) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  std::vector<PlotSeries> drawn = series;
  Axis x{.low = kInfinity, .high = -kInfinity, .begin = kLeft, .end = kWidth - kRight};
  Axis y{.low = kInfinity, .high = -kInfinity, .begin = kHeight - kBottom, .end = kTop};
  for (PlotSeries& one : drawn) {
    one.points = thinned(finite_points(one.points));
    for (const PlotPoint& point : one.points) {
      x.low = std::min(x.low, point.x);
      x.high = std::max(x.high, point.x);
      y.low = std::min(y.low, point.y);
      y.high = std::max(y.high, point.y);
    }
  }
  if (!(x.low <= x.high)) return "";
  if (x.low == x.high) x.high = x.low + 1;
  y.log = options.log_y && y.low > 0;
  if (options.from_zero) y.low = std::min(0.0, y.low);
  if (y.log) {
    y.low /= 1.1;
    y.high *= 1.1;
  } else {
    const double margin = y.high > y.low ? 0.06 * (y.high - y.low) : std::max(1e-3, 0.1 * std::abs(y.high));
    y.high += margin;
    if (!options.from_zero) y.low -= margin;
  }
  std::string svg = fmt::format(R"(<svg viewBox="0 0 {} {}" role="img" aria-label="{}">)", kWidth, kHeight,
                                escape(options.title));
  svg += frame(options, x, y);
  for (const PlotSeries& one : drawn) svg += polyline(one, x, y);
  return svg + legend(drawn) + "</svg>";
}

}  // namespace kiln
