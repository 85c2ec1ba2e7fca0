#include "core/command_line.h"
#include "evaluate/evaluate_command.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <vector>

#include "cli/build_identity.h"
#include "cli/commands.h"
#include "core/error.h"
#include "diffusion/sampler.h"
#include "models/model_record.h"
#include "parallel/ranks/agreement.h"
#include "parallel/ranks/rendezvous.h"
#include "train/run_evaluation.h"

namespace kiln::cli {
namespace {

// Adds the options for how a run's samples are drawn, as in `kiln sample`.
void add_sampling_options(CLI::App* command, SampleCommand& sampling) {
  const std::vector<CLI::Option*> others = command->get_options();
  command->add_option("--cfg-scale", sampling.cfg_scale,
                      "Classifier-free guidance; 1 = off (default: as the model is published)");
  command->add_option("--guidance-interval", sampling.guidance_interval,
                      "LO:HI: guide only within these shares of the schedule");
  command->add_option(
      "--sampler", sampling.sampler,
      fmt::format("{} (default: as the model is published)", fmt::join(sampler_names(), " | ")));
  command->add_option("--num-sampling-steps", sampling.num_sampling_steps,
                      "Steps of the sampler (default: as the model is published)");
  command->add_option(
      "--prompts", sampling.prompts_file,
      "File with one prompt per line, drawn in turn (default: captions that the run holds out "
      "for validation, else those of its training data)");
  command->add_option("--prompt", sampling.prompts, "What to draw, in words; several are drawn in turn")
      ->allow_extra_args(false);  // the next argument may be the run
  command->add_option("--negative-prompt", sampling.negative_prompt, "What guidance moves away from");
  command->add_option("--text-encoder", sampling.text_encoder,
                      "Folder of the text encoder and its tokenizer (default: the run's)");
  command->add_option("--seed", sampling.seed, "Seed of the samples")->check(not_negative());
  command->add_flag("--random-labels", sampling.random_labels, "Draw classes at random instead of in turn");
  command->add_option("--ema-decay", sampling.ema_decay,
                      "Use the weight average of this decay (default: the first)");
  command->add_flag("--no-ema", sampling.no_ema, "Use the trained weights, not their average");
  command->add_option("--autoencoder", sampling.autoencoder,
                      "Autoencoder that decodes the latents (default: the run's)");
  command->add_option("--base", sampling.base,
                      "Weights that the run's adapter was trained on (default: the path that the run names)");
  command->add_flag(
      "--anyway", sampling.anyway,
      "Draw even with another autoencoder, text encoder, tokenizer, schedule or base than the run "
      "was trained with");
  command->add_option("--sample-batch", sampling.batch, "Images drawn at a time");
  command->add_option("--compute-dtype", sampling.compute_dtype, "f32 | bf16 | fp16");
  command->add_flag("--tf32", sampling.tf32, "CUDA: compute f32 products in TF32");
  for (CLI::Option* option : command->get_options())
    if (std::ranges::find(others, option) == others.end()) option->group("Samples of a run");
}

// Draws a run's pictures for captions of its own data unless prompts are given. The first rank says which.
void take_captions(EvaluateCommand& command, ProcessGroup& group) {
  SampleCommand& sampling = command.sampling;
  if (!is_run_folder(command.samples) || !sampling.prompts.empty() || !sampling.prompts_file.empty()) return;
  RunCaptions captions;
  as_rank(group, [&] {
    captions = captions_of_run(command.samples,
                               command.num_pictures > 0 ? command.num_pictures : sampling.num_images);
  });
  if (!captions.texts.empty() && group.rank() == 0)
    fmt::print(stderr, "kiln evaluate: draws for {} {}\n", captions.texts.size(), captions.origin);
  sampling.prompts = std::move(captions.texts);
}

}  // namespace

void add_evaluate_command(CLI::App& app) {
  auto* command =
      app.add_subcommand("evaluate", "Measure FID and other metrics of pictures, with their protocol");
  auto options = std::make_shared<EvaluateCommand>();
  auto compared = std::make_shared<std::vector<std::string>>();
  command->add_option(
      "samples", options->samples,
      "Folder of pictures, .npz (arr_0), or a run folder, whose model first draws --num-pictures");
  command->add_option("--reference", options->reference,
                      "Folder or .npz of pictures, or .npz of statistics (ADM's, pytorch-fid's)");
  command->add_option("--net", options->net, "Feature net: inception | dinov2 | random (needs no weights)")
      ->capture_default_str();
  command->add_option("--net-weights", options->net_weights,
                      "Weights of the feature net: .pth, .safetensors or a folder");
  command->add_option("--resize", options->resize,
                      "inception: tf1 (ADM, torch-fidelity) | torch (pytorch-fid); dinov2: pillow | tf1");
  command
      ->add_option("--metrics", options->metrics,
                   "fid, sfid, inception_score, precision_recall, kid (default: all that the net can give)")
      ->delimiter(',');
  command->add_option("--splits", options->splits, "Splits of the Inception Score")->capture_default_str();
  command->add_option("--k", options->k, "Neighbours of precision and recall")->capture_default_str();
  command->add_option("--num-pictures", options->num_pictures,
                      "Samples to judge (default: all; of a run 8, which only test the settings)");
  command->add_option("--crop", options->crop,
                      "Side of the centre crop of the reference's pictures, as DiT crops");
  command->add_option("--out", options->out, "Also write the result to this JSON file");
  command->add_option("--save-reference", options->save_reference,
                      "Write the reference's statistics to this .npz");
  command->add_option("--batch", options->batch, "Pictures at a time")->capture_default_str();
  command->add_option("--device", options->device, "auto | cpu | cuda")->capture_default_str();
  command->add_option("--threads", options->threads, "Compute threads (0: all cores)")->capture_default_str();
  command->add_option("--nproc", options->nproc, "Start this many ranks on this machine");
  command->add_option("--compare", *compared, "Show results side by side: two or more JSON files of --out");
  add_sampling_options(command, options->sampling);
  show_first(*command, {"--reference", "--net", "--net-weights", "--metrics", "--num-pictures", "--out",
                        "--save-reference", "--device", "--nproc", "--compare", "--cfg-scale", "--sampler",
                        "--num-sampling-steps", "--prompts", "--seed"});
  command->callback([options, compared] {
    if (!compared->empty()) return compare_results(*compared);
    if (const int64_t num_ranks = ranks_to_launch("evaluate", options->nproc)) return launch_ranks(num_ranks);
    options->sampling.device = options->device;
    options->sampling.threads = options->threads;
    const std::shared_ptr<ProcessGroup> group = join_patiently(build_identity());
    take_captions(*options, *group);
    run_evaluate_command(*options, *group);
  });
}

}  // namespace kiln::cli
