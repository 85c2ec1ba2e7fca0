#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>

#include "cli/build_identity.h"
#include "cli/commands.h"
#include "core/command_line.h"
#include "diffusion/objective.h"
#include "diffusion/sampler.h"
#include "download/download_command.h"
#include "download/published.h"
#include "models/registry.h"
#include "parallel/ranks/agreement.h"
#include "parallel/ranks/rendezvous.h"
#include "sample/sample_options.h"

namespace kiln::cli {
namespace {

// For --model NAME of published weights alone: fetches the weights, and sets options that are not given as
// the authors draw.
void use_published_model(SampleCommand& sample, const DownloadOptions& download) {
  if (!sample.run.empty() || !sample.weights.empty() || sample.model.empty()) return;
  const PublishedModel* model = find_published_model(sample.model);
  if (!model) refuse_without_weights(sample.model);
  sample.weights = download_weights(model->weights, download);
  if (sample.autoencoder.empty()) sample.autoencoder = download_weights(model->autoencoder, download);
  if (sample.out.empty()) {
    std::string name = model->name;
    std::replace(name.begin(), name.end(), '/', '-');
    sample.out = fmt::format("{}-seed{}", name, sample.seed);
    sample.grid = !sample.no_png;
    fmt::print(stderr, "kiln sample: writing to {}\n", sample.out);
  }
  if (sample.classes.empty()) sample.classes = model->classes;
  if (sample.image_size == 0) sample.image_size = model->image_size;
  sample.model = model->model;
}

}  // namespace

void add_sample_command(CLI::App& app) {
  auto* command = app.add_subcommand("sample", "Draw images with a trained model");
  auto options = std::make_shared<SampleCommand>();
  command->add_option("--run", options->run,
                      "Run folder of kiln train; samples come from its newest checkpoint and first EMA");
  command->add_option("--weights", options->weights,
                      "Weights instead of a run: a safetensors or .pt file, a diffusers folder, a run or a "
                      "checkpoint. What they say of themselves decides how they draw");
  command->add_option(
      "--model", options->model,
      fmt::format("Model of --weights that do not say it: {}; or published weights that are fetched "
                  "(DiT-XL/2-256, -512)",
                  denoiser_names_text()));
  command->add_option("--adapter", options->adapter,
                      "LoRA adapter (PEFT folder, diffusers or kohya file, run) to add to the weights");
  command->add_option(
      "--base", options->base,
      "Weights that the adapter of --run was trained on (default: the path that the run names)");
  command->add_flag(
      "--anyway", options->anyway,
      "Draw with another autoencoder, text encoder, tokenizer, schedule or base than the weights "
      "were trained with");
  auto download = std::make_shared<DownloadOptions>();
  command->add_flag("--offline", download->offline, "Published weights: use only what was fetched before");
  command->add_option("--mirror", download->mirrors, "Published weights: see kiln download --help");
  command->add_option("--model-config", options->model_config,
                      "JSON (text or file) that overrides what --weights say of the model");
  command->add_option(
      "--objective", options->objective,
      fmt::format("Objective that the weights were trained with: {} (default: as they say, or as published)",
                  fmt::join(objective_names(), ", ")));
  command->add_option("--flow-shift", options->flow_shift,
                      "Shift of objective flow (default: as the weights say, or as published)");
  command->add_option("--image-size", options->image_size,
                      "Side in pixels of the pictures that --weights are made for (default: as they say)");
  command->add_option("--autoencoder", options->autoencoder,
                      "Autoencoder that decodes the latents, or pixels (default: as the weights say)");
  command
      ->add_option("--tiles", options->tiles,
                   "Decode pictures larger than this many pixels a side in tiles of that side, with blended "
                   "seams: off, a side, or auto (512 if there is no memory for the whole picture)")
      ->capture_default_str();
  command->add_option("--ema-decay", options->ema_decay,
                      "Use the weight average of this decay (default: the run's first)");
  command->add_flag("--no-ema", options->no_ema, "Use the trained weights, not their average");

  command->add_option("--num-images", options->num_images, "Images to draw")->capture_default_str();
  command
      ->add_option("--classes", options->classes, "Classes by number or name, drawn in turn (default: all)")
      ->delimiter(',');
  command->add_option("--prompt", options->prompts, "What to draw, in words; several are drawn in turn");
  command->add_option("--prompts", options->prompts_file, "File with one prompt per line");
  command->add_option("--negative-prompt", options->negative_prompt,
                      "What guidance moves away from (default: no words)");
  command->add_option("--text-encoder", options->text_encoder,
                      "Folder of the text encoder and its tokenizer (default: as the weights say)");
  command->add_option("--height", options->height, "Height of the pictures in pixels (default: the model's)");
  command->add_option("--width", options->width, "Width of the pictures in pixels (default: the model's)");
  command->add_option("--aspect-ratio", options->aspect_ratio,
                      "Width to height, such as 16:9; takes the nearest published size of about the model's "
                      "area; not with --height or --width");
  command->add_option("--image", options->image,
                      "Picture to start from instead of noise alone; all images start from it, each with its "
                      "own noise. Without --height and --width they have its size");
  command->add_option("--strength", options->strength,
                      "How far to go from --image: the share of the sampler's steps to take, from above 0 "
                      "(the picture) to 1 (default: 0.8)");
  command->add_flag(
      "--random-labels", options->random_labels,
      "Draw each picture's class at random from --classes, by the seed and the picture's number");
  command->add_option("--guidance-interval", options->guidance_interval,
                      "LO:HI: guide only within these shares of the schedule (0: clean, 1: noise)");
  command->add_option("--cfg-scale", options->cfg_scale,
                      "Classifier-free guidance; 1 = off (default: as the weights say, or as published)");
  command
      ->add_option("--cfg-convention", options->cfg_convention,
                   "Channels to guide: plain (all), dit (those that DiT guides), or auto (dit if the model "
                   "predicts a sigma)")
      ->capture_default_str();
  command->add_option("--sampler", options->sampler,
                      fmt::format("Sampler: {} (default: as the weights say, else as the model is published; "
                                  "where that one cannot draw with "
                                  "the objective, flow_euler or ddim)",
                                  fmt::join(sampler_names(), ", ")));
  command->add_option(
      "--num-sampling-steps", options->num_sampling_steps,
      "Steps of the sampler (default: as the weights say, or as published; for another sampler 250 with "
      "ddpm, 20 with dpmpp_2m, 50 with the others)");
  command->add_option("--seed", options->seed, "Seed of the noise; an image has the same noise in any batch")
      ->check(not_negative())
      ->capture_default_str();

  command->add_option(
      "--noise", options->noise,
      "safetensors file of the noise to draw from instead of the seed's, to compare with other "
      "programs: \"noise\" (N, C, H, W), \"step_noise\" (steps, N, C, H, W)");
  command->add_option("--save-noise", options->save_noise,
                      "Write the seed's noise into a file that --noise reads");

  command->add_option("--out", options->out,
                      "Folder of PNG files; rerunning the same command draws what is missing");
  command->add_option("--npz", options->npz,
                      "Also write all images into this .npz, as ADM does (arr_0, uint8 NHWC)");
  command->add_flag("--no-png", options->no_png, "Write only the .npz");
  command->add_flag("--grid", options->grid, "Also write OUT/grid.png");
  command->add_option("--batch", options->batch, "Images drawn at once")->capture_default_str();
  command->add_option("--device", options->device, "Device: auto, cpu or cuda")->capture_default_str();
  command->add_option("--compute-dtype", options->compute_dtype, "Precision: f32, bf16 or fp16")
      ->capture_default_str();
  command->add_flag("--tf32", options->tf32, "CUDA: compute f32 products in TF32, as DiT's sample.py does");
  command
      ->add_option("--cuda-graph", options->cuda_graph,
                   "CUDA: replay the model's passes as one graph: auto or off")
      ->capture_default_str();
  command->add_option("--threads", options->threads, "Compute threads (0: all cores)")->capture_default_str();
  command->add_option("--nproc", options->nproc,
                      "Start this many ranks on this machine (0: one, or what the launcher says)");
  show_first(*command, {"--run", "--weights", "--model", "--adapter", "--num-images", "--classes", "--prompt",
                        "--negative-prompt", "--height", "--width", "--cfg-scale", "--sampler",
                        "--num-sampling-steps", "--seed", "--out"});
  command->callback([options, download] {
    if (const char* mirror = std::getenv("KILN_MIRROR")) download->mirrors.emplace_back(mirror);
    use_published_model(*options, *download);
    if (const int64_t num_ranks = ranks_to_launch("sample", options->nproc)) return launch_ranks(num_ranks);
    run_sample_command(*options, *join_patiently(build_identity()));
  });
}

}  // namespace kiln::cli
