// RUN/config.json: what a reader of a run's weights must know. The trainer writes it, sampling and conversion
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
  // What made the latents. `path` may be empty: a feature store does not know where its autoencoder lies.
  struct AutoencoderInfo {
    std::string name = "pixels";  // "pixels" | "autoencoder_kl"
    std::string path{}, fingerprint{};
    double scaling_factor = 1, shift_factor = 0;
  } autoencoder;
  // What encoded the captions; an empty `encoder`: there are none.
  struct TextInfo {
    std::string encoder{}, encoder_path{}, encoder_fingerprint{}, tokenizer_fingerprint{};
    int64_t max_tokens = 0;
    std::string prefix{}, suffix{};  // around every caption
    Dtype dtype = Dtype::kF32;       // that the features were trained in
  } text{};
  // Describes the adapter that a run trained: its checkpoints hold nothing else. An empty `config`: it
  // trained the model.
  struct AdapterInfo {
    nlohmann::json config{};  // PEFT's adapter_config.json
    std::string base_path{}, base_fingerprint{};
  } adapter{};
  std::vector<std::string> class_names;  // empty: classes have numbers only
  std::vector<double> ema_decays;        // of ema.safetensors, then of ema-<decay>.safetensors
};

// RUN/config.json, atomically. Throws Error.
void write_run_info(const std::string& run, const RunInfo& info);
// Throws Error naming the file and the key that is missing or of the wrong kind.
RunInfo read_run_info(const std::string& run);

// The model's weights of a run: those of a file of run_weights(), or, of an adapter, its base with it merged.
// Throws Error: the base is not there, or is another one.
std::map<std::string, at::Tensor> load_run_weights(const RunInfo& info, const std::string& file);

// The weights file of the newest complete checkpoint whose bytes of it are those written: EMA of `decay`
// (absent: the run's first), or with `use_ema` false the model itself. A run without EMA gives the model.
// Throws Error: no checkpoint yet, no such decay.
std::string run_weights(const std::string& run, const RunInfo& info, bool use_ema,
                        std::optional<double> decay);

}  // namespace kiln
