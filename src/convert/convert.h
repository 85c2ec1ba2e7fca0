// `kiln convert`: weights with their record between .pt, safetensors and diffusers folders.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "models/weights_source.h"

namespace kiln {

struct ConvertOptions {
  std::string in{};     // .pt/.pth, .safetensors, index, diffusers folder, run folder, checkpoint folder
  std::string out{};    // *.pt | *.pth, *.safetensors, else a diffusers folder, which must not exist
  std::string model{};  // name that the weights must fit; "" = recognised from them
  bool ema = true;      // take the average of a file or checkpoint that holds both
  std::string model_config{};  // JSON (text or file) that overrides what the weights say of themselves
  int64_t image_size = 0;      // pixels that the model is made for; 0 = as the weights say
  bool overwrite = false;      // a weights file that kiln convert did not write
  bool anyway = false;         // merge an adapter of another base
  std::string merge{};  // LoRA adapter to add to the weights: PEFT's, diffusers', kohya's, a run's; "" = none
  std::string adapter_format{};  // for a run's adapter: peft | diffusers | kohya; "" = PEFT's as a folder,
                                 // else diffusers'
  std::string dtype{};           // f32 | bf16 | fp16; "" = as they are
  // Components of a diffusers folder: the autoencoder and the folder of the text encoder with its tokenizer,
  // and whether they go in: copy | link (small files are copied) | none. With copy and link those that are
  // not given lie where the record says; "" = those that are given are copied.
  std::string autoencoder{}, text_encoder{}, components{};
  // The objective that the model was trained for and its shift; "" and absent = as the weights say, else as
  // published.
  std::string objective{};
  std::optional<double> flow_shift{};
  std::optional<int64_t> input_size{}, num_heads{};  // for what the weights may not tell
};

// Writes options.out and prints what was done. Atomic. Throws Error.
void convert(const ConvertOptions& options);

// True if these weights are an adapter's, not a model's.
bool is_run_adapter(const WeightsSource& source);
// Writes it to `out`: a folder (PEFT's, with adapter_config.json) or a safetensors file. `format`: peft,
// diffusers or kohya; "": PEFT's as a folder, else diffusers'. `dtype`: "" keeps the adapter's. Throws Error
// for files of other programs in its place, unless it may overwrite them.
void write_run_adapter(const WeightsSource& source, const std::string& out, const std::string& format,
                       const std::string& dtype, bool overwrite);

// Which files kiln convert may replace.
// Throws Error if the weights file, or the FILE.json of a .pt file, is there and of another program, unless
// it may be overwritten.
void check_replaceable(const std::string& path, bool overwrite);
// The same for another file beside it, which has `content` if Kiln wrote it.
void check_replaceable(const std::string& path, const std::string& content, bool overwrite);

}  // namespace kiln
