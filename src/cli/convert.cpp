#include "convert/convert.h"

#include "cli/commands.h"

namespace kiln::cli {

void add_convert_command(CLI::App& app) {
  auto* command = app.add_subcommand("convert", "Weights between .pt, safetensors and diffusers folders");
  auto options = std::make_shared<ConvertOptions>();
  command->add_option("--in", options->in, "Weights file, diffusers folder, run folder or checkpoint")
      ->required();
  command->add_option("--out", options->out, "*.pt, *.safetensors, or a new folder for diffusers")
      ->required();
  command->add_option("--model", options->model, "Refuse weights that are not of this model (DiT-XL/2, ...)");
  command->add_flag("--ema,!--no-ema", options->ema, "Take EMA weights where there are any (default)");
  command->add_option("--dtype", options->dtype, "f32 | bf16 | fp16 (default: as stored)");
  command->add_option("--vae", options->vae, "diffusers AutoencoderKL folder to put into the pipeline");
  command->add_option(
      "--objective", options->objective,
      "What the model predicts, for the pipeline's scheduler: iddpm | epsilon | v_prediction | x_0 | flow");
  command->add_option("--input-size", options->input_size,
                      "Latent size, for weights without pos_embed (default 32)");
  command->add_option("--num-heads", options->num_heads, "Heads, for widths that are no multiple of 64");
  command->callback([options] { convert(*options); });
}

}  // namespace kiln::cli
