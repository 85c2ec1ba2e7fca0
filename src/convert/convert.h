// `kiln convert`: weights between DiT's .pt, safetensors and a diffusers DiTPipeline folder.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

namespace kiln {

struct ConvertOptions {
  std::string in{};     // .pt/.pth, .safetensors, index, diffusers folder, run folder, checkpoint folder
  std::string out{};    // *.pt | *.pth, *.safetensors, else a diffusers folder, which must not exist
  std::string model{};  // name that the weights must fit; "" = recognised from them
  bool ema = true;      // take the average of a file or checkpoint that holds both
  std::string merge{};  // LoRA adapter to add to the weights: PEFT's, diffusers', kohya's, a run's; "" = none
  std::string adapter_format{};  // for a run's adapter: peft | diffusers | kohya; "" = PEFT's as a folder,
                                 // else diffusers'
  std::string dtype{};           // f32 | bf16 | fp16; "" = as they are
  std::string vae{};             // diffusers AutoencoderKL folder to put into the pipeline
  // The objective that the model was trained for, which the pipeline's scheduler needs; "" = the run's, else
  // iddpm.
  std::string objective{};
  std::optional<int64_t> input_size{}, num_heads{};  // for what the weights may not tell
};

// Writes options.out and prints what was done. Atomic. Throws Error.
void convert(const ConvertOptions& options);

}  // namespace kiln
