#include "cli/build_identity.h"
#include "cli/commands.h"
#include "cli/not_negative.h"
#include "parallel/joining.h"
#include "parallel/launcher.h"
#include "sample/sample_command.h"

namespace kiln::cli {

void add_sample_command(CLI::App& app) {
  auto* command = app.add_subcommand("sample", "Pictures from a trained model");
  auto options = std::make_shared<SampleCommand>();
  command->add_option("--run", options->run,
                      "Run folder of kiln train: its newest checkpoint, its first EMA");
  command->add_option("--weights", options->weights,
                      "Weights file instead: safetensors, or DiT's or fast-DiT's .pt (its EMA)");
  command->add_option("--model", options->model, "Model of --weights (DiT-XL/2, ...)");
  command->add_option("--model-config", options->model_config, "JSON (text or file) over the model's preset");
  command
      ->add_option("--objective", options->objective,
                   "What --weights was trained with: iddpm | epsilon | v_prediction | x_0 | flow")
      ->capture_default_str();
  command->add_option("--image-size", options->image_size,
                      "Pixels a side, for --weights (default: the model's)");
  command->add_option("--autoencoder", options->autoencoder,
                      "Decoder of the latents, or pixels (default: the run's)");
  command->add_option("--ema-decay", options->ema_decay,
                      "Which of a run's weight averages (default: its first)");
  command->add_flag("--no-ema", options->no_ema, "The trained weights themselves, not their average");

  command->add_option("--num-images", options->num_images, "How many pictures")->capture_default_str();
  command
      ->add_option("--classes", options->classes, "Classes by number or name, drawn in turn (default: all)")
      ->delimiter(',');
  command->add_option("--cfg-scale", options->cfg_scale, "Classifier-free guidance; 1 = off (default: 4)");
  command
      ->add_option("--cfg-convention", options->cfg_convention,
                   "Guided channels: dit (the model's own), plain (all), or auto: dit if it predicts a sigma")
      ->capture_default_str();
  command->add_option("--sampler", options->sampler,
                      "ddpm | ddim | dpmpp_2m | flow_euler (default: ddpm, or flow_euler for flow models)");
  command->add_option("--num-sampling-steps", options->num_sampling_steps,
                      "Steps of the sampler (default: 250 for ddpm, 50 for the others)");
  command->add_option("--seed", options->seed, "Image i has the same noise in any batch")
      ->check(not_negative())
      ->capture_default_str();

  command->add_option("--out", options->out, "Folder of PNG files; rerunning the same command goes on")
      ->required();
  command->add_option("--npz", options->npz, "Also all images as ADM's .npz (arr_0, uint8 NHWC)");
  command->add_flag("--no-png", options->no_png, "Only the .npz");
  command->add_flag("--grid", options->grid, "Also OUT/grid.png");
  command->add_option("--batch", options->batch, "Images at a time")->capture_default_str();
  command->add_option("--device", options->device, "auto | cpu | cuda")->capture_default_str();
  command->add_option("--compute-dtype", options->compute_dtype, "f32 | bf16 | fp16")->capture_default_str();
  command->add_option("--threads", options->threads, "Compute threads (0: all cores)")->capture_default_str();
  command->add_option("--nproc", options->nproc,
                      "Start this many ranks on this machine (0: one, or what the launcher says)");
  command->callback([options] {
    if (const int64_t num_ranks = ranks_to_launch("sample", options->nproc)) return launch_ranks(num_ranks);
    run_sample_command(*options, *join_patiently(build_identity()));
  });
}

}  // namespace kiln::cli
