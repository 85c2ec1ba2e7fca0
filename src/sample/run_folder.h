// RUN/config.json: what a reader of a run's weights must know. The trainer writes it; sampling and conversion
// read it.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "core/dtype.h"

namespace kiln {

struct RunInfo {
  std::string model;            // registry name
  nlohmann::json model_config;  // as resolved
  nlohmann::json objective;     // make_objective's config
  int64_t image_size = 0;       // pixels
  // The autoencoder that made the latents. `path` may be empty: a feature store may not know where its
  // autoencoder is.
  struct AutoencoderInfo {
    std::string name = "pixels";  // "pixels" | "autoencoder_kl"
    std::string path{}, fingerprint{};
    double scaling_factor = 1, shift_factor = 0;
  } autoencoder;
  // The encoder of the captions. An empty `encoder`: there are no captions.
  struct TextInfo {
    std::string encoder{}, encoder_path{}, encoder_fingerprint{}, tokenizer_fingerprint{};
    int64_t max_tokens = 0;
    std::string prefix{}, suffix{};  // around every caption
    std::string instruction{};       // the encoder saw it before every caption; it has no rows
    Dtype dtype = Dtype::kF32;       // of the features in training
  } text{};
  // The adapter that a run trained; its checkpoints contain nothing else. An empty `config`: the run trained
  // the model itself.
  struct AdapterInfo {
    nlohmann::json config{};  // PEFT's adapter_config.json
    std::string base_path{}, base_fingerprint{};
  } adapter{};
  std::vector<std::string> class_names;  // empty: classes have numbers only
  std::vector<double> ema_decays;        // for ema.safetensors, then for ema-<decay>.safetensors
};

// True for the folder of a training run: it has a config.json and a folder of checkpoints.
bool is_run_folder(const std::string& path);

// Writes RUN/config.json atomically. Throws Error.
void write_run_info(const std::string& run, const RunInfo& info);
// Reads RUN/config.json. Throws Error naming the file and the key that is missing or of the wrong kind.
RunInfo read_run_info(const std::string& run);

// Loads the model's weights of a run: those of a file of run_weights() or, for an adapter, its base with the
// adapter merged. Throws Error: the base is missing, or is another one.
std::map<std::string, at::Tensor> load_run_weights(const RunInfo& info, const std::string& file);

// Returns the weights file of the newest complete checkpoint in which this file is undamaged: the EMA of
// `decay` (absent: the run's first), or the model itself if `use_ema` is false or the run has no EMA. Throws
// Error: no checkpoint yet, no such decay.
std::string run_weights(const std::string& run, const RunInfo& info, bool use_ema,
                        std::optional<double> decay);

}  // namespace kiln
