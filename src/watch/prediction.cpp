#include "watch/prediction.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.h"
#include "parallel/cpu_share.h"

namespace kiln {

namespace {

constexpr size_t kMaxCurvePoints = 300;
constexpr double kMemoryTolerance = 0.05, kTimeTolerance = 0.20;
constexpr int64_t kFewestSteps = 8;  // fewer steady steps are too few to judge a plan by their median

int64_t total(const std::map<std::string, int64_t>& by_kind) {
  int64_t sum = 0;
  for (const auto& [kind, bytes] : by_kind) sum += bytes;
  return sum;
}

// Replaces equal runs of points by their highest point if there are too many.
std::vector<MemoryCurve::Point> thinned(const std::vector<MemoryCurve::Point>& points) {
  if (points.size() <= kMaxCurvePoints) return points;
  std::vector<MemoryCurve::Point> kept;
  for (size_t i = 0; i < kMaxCurvePoints; ++i) {
    const auto at = [&](size_t index) {
      return points.begin() + static_cast<int64_t>(index * points.size() / kMaxCurvePoints);
    };
    kept.push_back(*std::max_element(
        at(i), at(i + 1), [](const auto& a, const auto& b) { return total(a.by_kind) < total(b.by_kind); }));
  }
  return kept;
}

MemoryCurve curve_from_json(const nlohmann::json& json) {
  MemoryCurve curve;
  for (const auto& phase : json.at("phase")) curve.points.push_back({.phase = phase, .by_kind = {}});
  for (const auto& [kind, values] : json.at("by_kind").items())
    for (size_t i = 0; i < curve.points.size(); ++i) curve.points[i].by_kind[kind] = values.at(i);
  return curve;
}

template <class T>
void read(const nlohmann::json& json, const char* key, T& field) {
  if (const auto found = json.find(key); found != json.end() && !found->is_null()) found->get_to(field);
}

}  // namespace

std::string size_text(double bytes) {
  return bytes >= 1e9 ? fmt::format("{:.2f} GB", bytes / 1e9) : fmt::format("{:.1f} MB", bytes / 1e6);
}

std::string text_of(const ComparedFigure& figure, double value) {
  if (!figure.is_time) return size_text(value);
  return value >= 1 ? fmt::format("{:.3f} s", value) : fmt::format("{:.2f} ms", 1e3 * value);
}

MemoryCurve memory_curve(const RecordedStep& step) {
  std::map<std::string, int64_t> live;
  for (const auto& [kind, bytes] : step.memory.persistent) live[std::string(name_of(kind))] += bytes;
  int64_t bytes = total(live);
  MemoryCurve curve;
  for (const Span& span : step.spans) {
    MemoryCurve::Point point{.phase = std::string(name_of(span.phase)), .by_kind = live};
    int64_t highest = bytes;
    for (const MemoryEvent& event : span.events) {
      live[std::string(name_of(event.kind))] += event.bytes;
      bytes += event.bytes;
      if (bytes <= highest) continue;
      highest = bytes;
      point.by_kind = live;
    }
    curve.points.push_back(std::move(point));
  }
  curve.points = thinned(curve.points);
  return curve;
}

nlohmann::json to_json(const MemoryCurve& curve) {
  nlohmann::json phases = nlohmann::json::array(), by_kind = nlohmann::json::object();
  for (const MemoryCurve::Point& point : curve.points)
    for (const auto& [kind, bytes] : point.by_kind)
      if (bytes > 0) by_kind[kind] = nlohmann::json::array();
  for (const MemoryCurve::Point& point : curve.points) {
    phases.push_back(point.phase);
    for (auto& [kind, values] : by_kind.items()) {
      const auto found = point.by_kind.find(kind);
      values.push_back(found == point.by_kind.end() ? 0 : found->second);
    }
  }
  return {{"phase", phases}, {"by_kind", by_kind}};
}

nlohmann::json to_json(const StepFigures& figures) {
  nlohmann::json json = {{"step_s", figures.step_s}, {"images_per_s", figures.images_per_s}};
  if (figures.peak_bytes > 0) json["peak_bytes"] = figures.peak_bytes;
  if (!figures.by_kind.empty()) json["by_kind"] = figures.by_kind;
  if (!figures.by_phase.empty()) json["by_phase"] = figures.by_phase;
  if (!figures.phase_s.empty()) json["phase_s"] = figures.phase_s;
  if (!figures.step_s_quartiles.empty()) {
    json["step_s_quartiles"] = figures.step_s_quartiles;
    json["stall_share"] = figures.stall_share;
    json["num_steps"] = figures.num_steps;
  }
  if (figures.taken_share > 0) json["taken_share"] = figures.taken_share;
  if (!figures.curve.points.empty()) json["curve"] = to_json(figures.curve);
  return json;
}

StepFigures figures_from_json(const nlohmann::json& json) {
  StepFigures figures;
  try {
    read(json, "peak_bytes", figures.peak_bytes);
    read(json, "by_kind", figures.by_kind);
    read(json, "by_phase", figures.by_phase);
    read(json, "step_s", figures.step_s);
    read(json, "images_per_s", figures.images_per_s);
    read(json, "phase_s", figures.phase_s);
    read(json, "step_s_quartiles", figures.step_s_quartiles);
    read(json, "stall_share", figures.stall_share);
    read(json, "num_steps", figures.num_steps);
    read(json, "taken_share", figures.taken_share);
    if (json.contains("curve")) figures.curve = curve_from_json(json.at("curve"));
  } catch (const nlohmann::json::exception& error) {
    fail("plan", "expected the figures of a step, got {}", error.what());
  }
  return figures;
}

double ComparedFigure::relative_error() const {
  if (predicted == 0) return measured == 0 ? 0 : std::numeric_limits<double>::infinity();
  return (measured - predicted) / predicted;
}

std::vector<ComparedFigure> compare(const StepFigures& predicted, const StepFigures& measured) {
  std::vector<ComparedFigure> compared;
  const auto add_all = [&](const std::string& prefix, const auto& first, const auto& second) {
    constexpr bool is_time = std::is_same_v<decltype(first), const std::map<std::string, double>&>;
    if (first.empty() || second.empty()) return;  // one side does not know
    auto names = first;
    names.insert(second.begin(), second.end());
    const auto at = [](const auto& values, const std::string& name) {
      const auto found = values.find(name);
      return found == values.end() ? 0.0 : static_cast<double>(found->second);
    };
    for (const auto& [name, value] : names)
      if (at(first, name) > 0 || at(second, name) > 0)
        compared.push_back({prefix + name, is_time, at(first, name), at(second, name)});
  };
  if (predicted.peak_bytes > 0 && measured.peak_bytes > 0)
    compared.push_back({"peak memory", false, static_cast<double>(predicted.peak_bytes),
                        static_cast<double>(measured.peak_bytes)});
  add_all("memory of ", predicted.by_kind, measured.by_kind);
  auto phases = predicted.by_phase, measured_phases = measured.by_phase;
  // The rehearsal took the planned batch and is the peak. Those of these steps were smaller.
  if (measured_phases.erase(kRehearsal) > 0)
    for (const char* step : {"first step", "steady step"}) measured_phases.erase(step);
  std::erase_if(phases, [&](const auto& phase) { return !measured_phases.contains(phase.first); });
  add_all("memory in ", phases, measured_phases);
  if (predicted.step_s > 0) compared.push_back({"step", true, predicted.step_s, measured.step_s});
  add_all("time of ", predicted.phase_s, measured.phase_s);
  return compared;
}

namespace {

// True if most measured steps lie beyond the tolerance, on the side of their median. Single slow steps of a
// short run or a busy machine do not count.
bool is_steadily_off(const StepFigures& predicted, const StepFigures& measured) {
  if (measured.step_s_quartiles.empty()) return true;  // not measured in a run
  if (measured.num_steps < kFewestSteps) return false;
  const double nearest = measured.step_s > predicted.step_s ? measured.step_s_quartiles.front()
                                                            : measured.step_s_quartiles.back();
  return std::abs(nearest - predicted.step_s) > kTimeTolerance * predicted.step_s;
}

}  // namespace

std::vector<std::string> findings(const StepFigures& predicted, const StepFigures& measured) {
  std::vector<std::string> found;
  for (const ComparedFigure& figure : compare(predicted, measured)) {
    const bool is_total = figure.name == "peak memory" || figure.name == "step";
    const double error = figure.relative_error();
    if (!is_total || std::abs(error) <= (figure.is_time ? kTimeTolerance : kMemoryTolerance)) continue;
    if (figure.is_time && !is_steadily_off(predicted, measured)) continue;
    const auto text = [&](double value) {
      return figure.is_time ? fmt::format("{:.3g} s", value) : size_text(value);
    };
    // Others lengthen the run's steps, or those by which the plan judged the machine.
    const std::string taken = taken_text((error > 0 ? measured : predicted).taken_share);
    const std::string cause =
        !figure.is_time || taken.empty()
            ? ""
            : fmt::format("; {} {}", taken, error > 0 ? "during the run" : "when the plan was made");
    found.push_back(fmt::format(
        "{} is {:.0f} % {} than the plan said: {} predicted, {} measured{}",
        figure.is_time ? "a step" : "peak memory", 100 * std::abs(error),
        error > 0 ? (figure.is_time ? "longer" : "higher") : (figure.is_time ? "shorter" : "lower"),
        text(figure.predicted), text(figure.measured), cause));
  }
  return found;
}

nlohmann::json comparison_json(const nlohmann::json& predicted, const StepFigures& measured) {
  return {{"predicted", predicted},
          {"measured", to_json(measured)},
          {"findings", predicted.is_null() ? std::vector<std::string>()
                                           : findings(figures_from_json(predicted), measured)}};
}

}  // namespace kiln
