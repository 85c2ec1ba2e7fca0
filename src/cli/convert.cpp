#include "convert/convert.h"

#include <fmt/ranges.h>

#include "cli/commands.h"
#include "diffusion/objective.h"

namespace kiln::cli {

void add_convert_command(CLI::App& app) {
  auto* command =
      app.add_subcommand("convert", "Convert weights between .pt, safetensors and diffusers folders");
  auto options = std::make_shared<ConvertOptions>();
  command->add_option("--in", options->in, "Weights file, diffusers folder, run folder or checkpoint")
      ->required();
  command->add_option("--out", options->out, "*.pt, *.safetensors, or a new folder for diffusers")
      ->required();
  command->add_option("--model", options->model,
                      "Refuse weights of any other model than this (DiT-XL/2, ...)");
  command->add_flag("--ema,!--no-ema", options->ema, "Take the EMA weights, if there are any (default)");
  command->add_option(
      "--merge", options->merge,
      "LoRA adapter (PEFT folder, diffusers or kohya file, run folder) to add to the weights");
  command->add_option(
      "--adapter-format", options->adapter_format,
      "Keys of the adapter that --in RUN trained: peft, diffusers or kohya (default: peft for a "
      "folder, diffusers for a file)");
  command->add_option("--dtype", options->dtype,
                      "Precision of the weights: f32, bf16 or fp16 (default: as stored)");
  command->add_option("--vae,--autoencoder", options->autoencoder,
                      "Autoencoder to put into the diffusers folder (default: none)");
  command->add_option("--text-encoder", options->text_encoder,
                      "Folder of the text encoder and its tokenizer to put into the diffusers folder");
  command->add_option("--components", options->components,
                      "How the run's autoencoder, text encoder and tokenizer, or those that are given, go "
                      "into the diffusers folder: copy, link (small files are copied) or none (default: "
                      "copy those that are given)");
  command->add_option(
      "--objective", options->objective,
      fmt::format("Objective that the model was trained with, where the weights do not say it: {}",
                  fmt::join(objective_names(), ", ")));
  command->add_option("--flow-shift", options->flow_shift,
                      "Shift of --objective flow (default: as the weights say, or as published)");
  command->add_option("--model-config", options->model_config,
                      "JSON (text or file) that overrides what the weights say of the model");
  command->add_option(
      "--image-size", options->image_size,
      "Side in pixels of the pictures that the model is made for, where the weights do not say it");
  command->add_flag("--overwrite", options->overwrite,
                    "Replace a weights file that kiln convert did not write");
  command->add_flag(
      "--anyway", options->anyway,
      "Merge an adapter that was trained on other weights, or put in another autoencoder, text encoder or "
      "tokenizer than that of the training");
  command->add_option("--input-size", options->input_size,
                      "Latent size, for weights without pos_embed (default 32)");
  command->add_option("--num-heads", options->num_heads,
                      "Attention heads, for widths that are not a multiple of 64");
  command->callback([options] { convert(*options); });
}

}  // namespace kiln::cli
