// The memory and time of a training step, predicted by a plan or measured by a run, and their comparison.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/json.h"
#include "step/span.h"

namespace kiln {

// Live bytes by kind over a step. Each phase of a segment gives one point, at the phase's peak.
struct MemoryCurve {
  struct Point {
    std::string phase;  // StepPhase's name
    std::map<std::string, int64_t> by_kind;
  };
  std::vector<Point> points;
};
// Returns at most a few hundred points. A longer step (many micro-batches) keeps the highest of each few
// points.
MemoryCurve memory_curve(const RecordedStep& step);
nlohmann::json to_json(const MemoryCurve& curve);  // {"phase": [...], "by_kind": {"weights": [...], ...}}

// The phase of by_phase in which a run rehearses its largest batch before the first step.
inline constexpr const char* kRehearsal = "rehearsal";

// Figures of a step: "predicted" in `kiln plan --json`, also "measured" in `kiln probe --json`. A field that
// is not known is empty or 0, and absent from the JSON.
struct StepFigures {
  int64_t peak_bytes = 0;                     // most live tensor bytes on the device in a steady step
  std::map<std::string, int64_t> by_kind{};   // bytes at that peak by MemoryKind's name
  std::map<std::string, int64_t> by_phase{};  // peak in load, first step, steady step, ...
  double step_s = 0, images_per_s = 0;        // of a steady step
  std::map<std::string, double> phase_s{};    // seconds by StepPhase's name, and "data"
  std::vector<double> step_s_quartiles{};     // measured: quartiles (25, 50, 75 %) of the newest
  double stall_share = 0;                     // measured: share of the time spent waiting for the loader
  int64_t num_steps = 0;                      // measured: number of steady steps
  // On a CPU this is the share of the processors' time that other programs had, in these steps or while the
  // plan measured the machine.
  double taken_share = 0;
  MemoryCurve curve{};
};
nlohmann::json to_json(const StepFigures& figures);
// Reads such an object and ignores other fields. Throws Error if a field has another type.
StepFigures figures_from_json(const nlohmann::json& json);

// A line of the comparison.
struct ComparedFigure {
  // "peak memory", "memory of activations", "memory in first step", "step", "time of forward"
  std::string name;
  bool is_time = false;  // seconds; otherwise bytes
  double predicted = 0, measured = 0;
  double relative_error() const;  // (measured - predicted) / predicted; infinite when nothing was predicted
};
// Writes a predicted or measured value as text: "1.23 GB", "1.234 s", "12.34 ms".
std::string text_of(const ComparedFigure& figure, double value);
std::vector<ComparedFigure> compare(const StepFigures& predicted, const StepFigures& measured);

// Returns a sentence if the peak is off by more than 5 %, and one if the step time is off by more than 20 %.
// A run's time counts from 8 steady steps on, and only if the nearer quartile is off as well. Says how much
// of the processors other programs had, if that explains it.
std::vector<std::string> findings(const StepFigures& predicted, const StepFigures& measured);

std::string size_text(double bytes);  // "1.23 GB"

// Returns the contents of RUN/plan.json: {"predicted": ..., "measured": ..., "findings": [...]}. `predicted`
// is null without a plan.
nlohmann::json comparison_json(const nlohmann::json& predicted, const StepFigures& measured);

}  // namespace kiln
