// What reports read of a run: its log, its evaluations and its newest checkpoint.
#pragma once
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/train_state.h"
#include "core/page/page.h"

namespace kiln {

// Returns a number of a log line, or NaN if the line has none of this name.
double number(const nlohmann::json& line, const std::string& key);
// Returns (step, value) of every line that has this number.
std::vector<PlotPoint> points_of(const std::vector<nlohmann::json>& lines, const char* key, double scale = 1);
// Returns the exponential mean with a horizon of a twentieth of the run, without the bias of its start.
std::vector<PlotPoint> smoothed(const std::vector<PlotPoint>& points);

struct ReportedRun {
  std::string folder{}, name{};                      // as given; the name of the folder
  std::vector<nlohmann::json> log{};                 // all lines
  std::vector<nlohmann::json> steps{};               // those with a loss
  std::vector<nlohmann::json> in_training{};         // results of --evaluate-every, oldest first
  std::vector<nlohmann::json> by_command{};          // results of kiln evaluate, oldest first
  std::optional<TrainStateInfo> saved{};             // the newest checkpoint
  nlohmann::json record = nlohmann::json::object();  // of the weights in it, as to_json() writes it
  // By their names; of a run with stages those of the run. How pictures are drawn is as the record says.
  nlohmann::json options = nlohmann::json::object();
  // How far it has come, by the last line of its log or by a newer checkpoint.
  int64_t last_step = 0, images = 0;
  double seconds = 0;

  // Returns the losses of held-out samples over the steps.
  std::vector<PlotPoint> validation() const { return points_of(log, "validation_loss"); }
  // Return the median and the highest of a number of the log's steps. NaN if no line has it.
  double median(const char* key) const;
  double highest(const char* key) const;
};

// Reads log.jsonl, evaluations.jsonl and train_state.json of the newest checkpoint. What is not there stays
// empty.
ReportedRun read_reported_run(const std::string& folder);

}  // namespace kiln
