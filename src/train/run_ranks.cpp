#include "train/loop.h"

#include <chrono>
#include <cmath>
#include <exception>
#include <set>

#include "parallel/machine.h"
#include "parallel/ranks/agreement.h"
#include "run/option_values.h"
#include "run/stage_options.h"
#include "train/setup.h"

namespace kiln {

namespace {

// Options that may differ between machines: paths of their own copies (the content is compared), and how they
// load.
const std::set<std::string>& options_of_one_machine() {
  static const std::set<std::string> names = {"data",
                                              "more-data",
                                              "validation-data",
                                              "autoencoder",
                                              "weights",
                                              "nvme-path",
                                              "loader-threads",
                                              "prefetch",
                                              "threads",
                                              "nproc",
                                              "peak-tflops",
                                              "device",
                                              "evaluate-reference",
                                              "evaluate-net-weights"};
  return names;
}

nlohmann::json settings_of(const TrainOptions& options, const std::string& build, at::Device device) {
  // --device may differ between machines, but "auto" may find a GPU on one and none on the other.
  nlohmann::json settings = {{"kiln", build}, {"the device (--device)", device.is_cuda() ? "cuda" : "cpu"}};
  const nlohmann::json all = to_json(options);
  for (const auto& [name, value] : all.items())
    if (!options_of_one_machine().contains(name)) settings["--" + name] = value;
  for (size_t stage = 0; stage < options.stages.size(); ++stage) {
    nlohmann::json keys = to_json(options.stages[stage]);
    for (const std::string& name : options_of_one_machine()) keys.erase(name);
    settings[stage_name(options.stages[stage], stage)] = keys;
  }
  return settings;
}

std::chrono::milliseconds timeout_of(const TrainOptions& options) {
  return std::chrono::milliseconds(std::llround(options.ranks.collective_timeout * 1000));
}

}  // namespace

int64_t ranks_to_launch(const TrainOptions& options) {
  const int64_t num_ranks = ranks_to_launch("train", options.ranks.nproc);
  if (num_ranks > 0) {  // here, so that there is one message and not one from every rank
    validate(options);
    zero_options_of(options, num_ranks);
  }
  return num_ranks;
}

std::shared_ptr<ProcessGroup> join_ranks(const TrainOptions& options, const std::string& build) {
  const Ranks ranks = ranks_from_environment();
  ProcessGroupOptions group_options;
  std::exception_ptr refusal;  // of this rank's options; the others wait to hear of it
  try {
    validate(options);
    group_options = {.device = choose_device(options.compute.device, ranks.local_rank),
                     .timeout = timeout_of(options)};
  } catch (const std::exception&) {
    refusal = std::current_exception();
  }
  std::shared_ptr<ProcessGroup> group = ProcessGroup::connect(ranks, group_options);
  agree(*group, "the options", [&] {
    if (refusal) std::rethrow_exception(refusal);
  });
  require_same_run(*group, options, build, group_options.device);
  return group;
}

void require_same_run(ProcessGroup& group, const TrainOptions& options, const std::string& build,
                      at::Device device) {
  require_same_on_all_ranks(group, settings_of(options, build, device));
}

}  // namespace kiln
