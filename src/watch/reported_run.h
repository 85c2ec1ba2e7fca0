// What reports read of a run: its log, its evaluations and its newest checkpoint.
#pragma once
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/train_state.h"
#include "core/json.h"
#include "core/page/page.h"

namespace kiln {

// Returns a number of a log line, or NaN if the line has none of this name.
double number(const nlohmann::json& line, const std::string& key);
// Returns (step, value) of every line that has this number.
std::vector<PlotPoint> points_of(const std::vector<nlohmann::json>& lines, const char* key, double scale = 1);
// Returns the exponential mean with a horizon of a twentieth of the run, without the bias of its start.
std::vector<PlotPoint> smoothed(const std::vector<PlotPoint>& points);

inline constexpr size_t kMostPictureBytes = size_t{256} << 20;
inline constexpr size_t kMostGrids = 12;  // on the page of a run

struct ReportedGrid {
  std::string name, source;  // the name of its file, without ".png"; where a page finds it (Page::picture)
  // How it was drawn and what it shows, row by row, as its file says: "seed 0, ddim in 50 steps, guidance 4,
  // ema-0.9999: a bird | two birds". Empty for a grid of an earlier version.
  std::string drawn;
};

struct ReportedRun {
  std::string folder{}, name{};               // as given; the name of the folder
  std::vector<nlohmann::json> log{};          // the lines with an event
  std::vector<nlohmann::json> steps{};        // those with a loss, or means of several (thinned_lines.h)
  std::vector<nlohmann::json> in_training{};  // results of --evaluate-every, oldest first
  std::vector<nlohmann::json> by_command{};   // results of kiln evaluate, oldest first
  std::vector<ReportedGrid> grids{};          // that the page shows, oldest first
  std::optional<TrainStateInfo> saved{};      // the newest checkpoint
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

// Throws Error of `who` unless the folder has a log or checkpoints.
void require_run_folder(const char* who, const std::string& folder);

// Reads log.jsonl, evaluations.jsonl and train_state.json of the newest checkpoint, but no grids. What is not
// there stays empty.
ReportedRun read_reported_run(const std::string& folder);

// The parts of that, for who reads a run while it grows.

// Returns a run of which nothing was read.
ReportedRun unread_run(const std::string& folder);
// Takes over a line of the log, but for `log` and `steps`.
void count_line(const nlohmann::json& line, ReportedRun& run);
// Reads the evaluations and the newest checkpoint anew.
void read_beside_log(ReportedRun& run);

// Returns the files of the run's sample grids, oldest first.
std::vector<std::filesystem::path> grid_paths(const std::string& run);
// Returns at most `most` of these, evenly spread, always with the newest.
std::vector<std::filesystem::path> spread(const std::vector<std::filesystem::path>& paths, size_t most);
// Reads how a grid was drawn from its file. `source` as in ReportedGrid; "" embeds the file. Throws Error.
ReportedGrid read_grid(const std::filesystem::path& path, std::string source = "");
// Returns at most `most` grids of the run, embedded.
std::vector<ReportedGrid> read_grids(const std::string& run, size_t most);

}  // namespace kiln
