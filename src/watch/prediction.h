// The memory and time of one step of training, as a plan predicts them and as a run measures them: one
// shape for both, and the comparison.
#pragma once
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "step/span.h"

namespace kiln {

// Live bytes by kind over the step: one point per phase of a segment, at the phase's peak.
struct MemoryCurve {
  struct Point {
    std::string phase;  // StepPhase's name
    std::map<std::string, int64_t> by_kind;
  };
  std::vector<Point> points;
};
// At most a few hundred points: of a longer step (many micro-batches) the highest of each few.
MemoryCurve memory_curve(const RecordedStep& step);
nlohmann::json to_json(const MemoryCurve& curve);  // {"phase": [...], "by_kind": {"weights": [...], ...}}

// The object that `kiln plan --json` calls "predicted" and `kiln probe --json` also "measured". A field that
// is not known is empty or 0, and absent from the JSON.
struct StepFigures {
  int64_t peak_bytes = 0;                     // most live tensor bytes on the device in a steady step
  std::map<std::string, int64_t> by_kind{};   // MemoryKind's names: bytes at that peak
  std::map<std::string, int64_t> by_phase{};  // load, first step, steady step, ...: the most in each
  double step_s = 0, images_per_s = 0;        // of a steady step
  std::map<std::string, double> phase_s{};    // StepPhase's names, and data: seconds of such a step
  std::vector<double> step_s_quartiles{};     // measured: at 25, 50 and 75 % of the steady steps
  double stall_share = 0;                     // measured: of the time, spent waiting for the loader
  int64_t num_steps = 0;                      // measured: how many steady steps
  MemoryCurve curve{};
};
nlohmann::json to_json(const StepFigures& figures);
// Reads any such object and ignores other fields. Throws Error when a field has another type.
StepFigures figures_from_json(const nlohmann::json& json);

// A line of the comparison.
struct ComparedFigure {
  std::string
      name;  // "peak memory", "memory of activations", "memory in first step", "step", "time of forward"
  bool is_time = false;  // seconds, else bytes
  double predicted = 0, measured = 0;
  double relative_error() const;  // (measured - predicted) / predicted; infinite when nothing was predicted
};
// The predicted or the measured value as text: "1.23 GB", "1.234 s", "12.34 ms".
std::string text_of(const ComparedFigure& figure, double value);
std::vector<ComparedFigure> compare(const StepFigures& predicted, const StepFigures& measured);

// A peak off by more than 5 %, a step time off by more than 20 %: one sentence each. Of a run, its time is
// compared once it has 8 steady steps, and only where the nearer quartile is off as well.
std::vector<std::string> findings(const StepFigures& predicted, const StepFigures& measured);

std::string size_text(double bytes);  // "1.23 GB"

// {"predicted": ..., "measured": ..., "findings": [...]}: what RUN/plan.json holds. `predicted` null: without
// a plan.
nlohmann::json comparison_json(const nlohmann::json& predicted, const StepFigures& measured);

}  // namespace kiln
