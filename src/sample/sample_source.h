// The model that `kiln sample` draws with, loaded from a run folder or a weights file.
#pragma once
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "models/autoencoders/autoencoder.h"
#include "models/model.h"
#include "models/run_folder.h"
#include "sample/sample_options.h"

namespace kiln {

struct SampleSource {
  std::string model;
  nlohmann::json model_config, objective;
  std::string weights;              // the file that was loaded
  std::string weights_fingerprint;  // of its bytes
  std::string average;              // what the weights are: "ema-0.9999" | "model" | "of the file"
  std::vector<std::string> class_names;
  ModelRecord::TextInfo text;          // encoder of the captions; unknown for a weights file
  std::unique_ptr<Denoiser> denoiser;  // its weights in the compute dtype
  std::unique_ptr<Autoencoder> autoencoder;
};

// `num_processes` is the number of processes on this machine, which share its memory. Throws Error: neither
// or both of --run and --weights, an autoencoder that does not fit the model.
SampleSource load_sample_source(const SampleCommand& command, at::Device device, at::ScalarType compute_dtype,
                                int64_t num_processes);

}  // namespace kiln
