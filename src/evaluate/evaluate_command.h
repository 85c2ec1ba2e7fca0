// `kiln evaluate`: metrics of pictures, with the protocol that they were measured by.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "parallel/ranks/process_group.h"
#include "sample/sample_command.h"

namespace kiln {

struct EvaluateCommand {
  std::string samples;    // folder, .npz, or a run folder whose model draws them first
  std::string reference;  // folder or .npz of pictures or statistics
  std::string net = "inception", net_weights, resize;
  std::vector<std::string> metrics;  // empty = all that the net gives
  int64_t splits = 10, k = 3;
  int64_t num_pictures = 0;         // of the samples; 0 = all
  int64_t crop = 0;                 // of the reference's pictures
  std::string out, save_reference;  // JSON of the result; .npz of the reference's statistics
  int64_t batch = 32;
  std::string device = "auto";
  int64_t threads = 0, nproc = 0;
  SampleCommand sampling;  // of a run
};

// Prints the result as JSON on stdout and appends it to RUN/evaluations.jsonl for a run. A collective. Throws
// Error.
void run_evaluate_command(const EvaluateCommand& command, ProcessGroup& group);

// Results of files side by side on stdout, saying what their protocols differ in. Throws Error.
void compare_results(const std::vector<std::string>& files);

}  // namespace kiln
