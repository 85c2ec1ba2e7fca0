// `kiln evaluate`: measures metrics of pictures and records the protocol.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "parallel/ranks/process_group.h"
#include "sample/sample_options.h"

namespace kiln {

struct EvaluateCommand {
  std::string samples;    // folder, .npz, or a run whose model draws them first
  std::string reference;  // folder or .npz of pictures or statistics
  std::string net = "inception", net_weights, resize;
  std::vector<std::string> metrics;  // empty = all metrics of the net
  int64_t splits = 10, k = 3;
  int64_t num_pictures = 0;         // number of samples; 0 = all
  int64_t crop = 0;                 // centre crop of the reference's pictures
  std::string out, save_reference;  // JSON of the result; .npz of the reference's statistics
  int64_t batch = 32;
  std::string device = "auto";
  int64_t threads = 0, nproc = 0;
  SampleCommand sampling;  // for a run
};

// Prints the result as JSON on stdout. For a run, also appends it to RUN/evaluations.jsonl. A collective.
// Throws Error.
void run_evaluate_command(const EvaluateCommand& command, ProcessGroup& group);

// Prints the results of several files side by side, and how their protocols differ. Throws Error.
void compare_results(const std::vector<std::string>& files);

}  // namespace kiln
