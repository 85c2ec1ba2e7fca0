#include "train/run_ranks.h"

#include <chrono>
#include <cmath>
#include <set>

#include "parallel/machine.h"
#include "train/setup.h"

namespace kiln {

namespace {

// Machines may differ in these: paths of their own copies (what is in them is compared), and how they load.
const std::set<std::string>& options_of_one_machine() {
  static const std::set<std::string> names = {"data",      "validation-data", "autoencoder", "weights",
                                              "nvme-path", "loader-threads",  "prefetch",    "threads",
                                              "nproc",     "peak-tflops",     "device"};
  return names;
}

nlohmann::json settings_of(const TrainOptions& options, const std::string& build) {
  nlohmann::json settings = {{"kiln", build}};
  const nlohmann::json all = to_json(options);
  for (const auto& [name, value] : all.items())
    if (!options_of_one_machine().contains(name)) settings["--" + name] = value;
  return settings;
}

std::chrono::milliseconds timeout_of(const TrainOptions& options) {
  return std::chrono::milliseconds(std::llround(options.collective_timeout * 1000));
}

}  // namespace

int64_t ranks_to_launch(const TrainOptions& options) {
  const int64_t num_ranks = ranks_to_launch("train", options.nproc);
  if (num_ranks > 0) zero_options_of(options, num_ranks);  // the impossible is said once, not by every rank
  return num_ranks;
}

std::shared_ptr<ProcessGroup> join_ranks(const TrainOptions& options, const std::string& build) {
  const Ranks ranks = ranks_from_environment();
  std::shared_ptr<ProcessGroup> group = ProcessGroup::connect(
      ranks, {.device = parse_device(options.device, ranks.local_rank), .timeout = timeout_of(options)});
  require_same_run(*group, options, build);
  return group;
}

void require_same_run(ProcessGroup& group, const TrainOptions& options, const std::string& build) {
  require_same_on_all_ranks(group, settings_of(options, build));
}

}  // namespace kiln
