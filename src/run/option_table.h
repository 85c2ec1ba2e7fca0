// The one table of the options of training: their names on the command line, in recipes and in config.toml,
// their help, and what a change of each does to a run that resumes.
#pragma once
#include <fmt/ranges.h>
#include <type_traits>

#include "core/tensors.h"
#include "diffusion/objective.h"
#include "diffusion/sampler.h"
#include "models/registry.h"
#include "optim/optimizer.h"
#include "run/train_options.h"

namespace kiln {

// What a changed option does to a run that resumes.
enum class OnResume {
  kRefuse,    // it is another run, which needs another folder
  kWarn,      // it is the same run with other rounding
  kHarmless,  // it only stops, logs, saves or samples differently
};

// Options of these types are written as text.
template <class T>
struct OptionalChoice : std::false_type {};
template <Choice E>
struct OptionalChoice<std::optional<E>> : std::true_type {};
template <class T>
concept ParsedOption = requires(const T& option) {
  { T::parse(option.text()) } -> std::same_as<T>;
};
// Its name may stand alone on the command line.
template <class T>
concept MeansAlone = ParsedOption<T> && requires {
  T::kAlone;
};
template <class T>
concept TextOption = Choice<T> || OptionalChoice<T>::value || ParsedOption<T>;

template <TextOption T>
std::string option_text(const T& option) {
  if constexpr (Choice<T>)
    return choice_name(option);
  else if constexpr (ParsedOption<T>)
    return option.text();
  else
    return option ? choice_name(*option) : "";
}

// Throws Error naming the option.
template <TextOption T>
void parse_option(const char* name, const std::string& text, T& option) {
  if constexpr (Choice<T>)
    option = parse_choice<T>("train", fmt::format("--{}", name), text);
  else if constexpr (ParsedOption<T>)
    option = T::parse(text);
  else if (text.empty())
    option.reset();
  else
    option = parse_choice<typename T::value_type>("train", fmt::format("--{}", name), text);
}

// Calls visitor(name, field, on_resume, help) for every option. Calls visitor.section(title) where a group
// begins, if the visitor has that function.
template <class Options, class Visitor>
void visit_options(Options& o, Visitor&& visitor) {
  using enum OnResume;
  const auto section = [&](const char* title) {
    if constexpr (requires { visitor.section(title); }) visitor.section(title);
  };
  const auto visit = [&](const char* name, auto& field, OnResume on_resume, const std::string& help) {
    visitor(name, field, on_resume, help);
  };
  const auto one_of = [](const std::vector<std::string>& names) {
    return fmt::format("{}", fmt::join(names, ", "));
  };
  section("Model");
  visit("model", o.model.name, kRefuse,
        "A published size, or its family with a width of your own: " + denoiser_names_text());
  visit("model-config", o.model.config, kRefuse,
        "Further model settings as JSON (text or file); they override the model's preset");
  visit("hidden-size", o.model.hidden_size, kRefuse, "Width of the transformer (0: the model's)");
  visit("depth", o.model.depth, kRefuse, "Number of blocks (0: the model's)");
  visit("num-heads", o.model.num_heads, kRefuse, "Attention heads (0: the model's)");
  visit("patch-size", o.model.patch_size, kRefuse, "Patch side in latent pixels (0: the model's)");
  visit("position-scale", o.model.position_scale, kRefuse,
        "Divide positions by this, for training at larger sizes (0: the model's)");
  visit("class-dropout-prob", o.model.class_dropout_prob, kRefuse,
        "Probability of training without the class label");
  visit("num-classes", o.model.num_classes, kRefuse,
        "Classes of the model (0: those of the data; synthetic: 1000)");
  visit("weights", o.model.weights, kRefuse,
        "Weights to start from, instead of random ones: a file, a model's folder, or a run (its newest)");

  section("Adapter (LoRA)");
  visit("lora-rank", o.lora.rank, kRefuse,
        "Train an adapter of this rank and freeze the model of --weights (0: train the model)");
  visit("lora-alpha", o.lora.alpha, kRefuse,
        "Scale the adapter's part by alpha / rank (0: alpha is the rank)");
  visit("lora-dropout", o.lora.dropout, kRefuse, "Probability of dropping an element of an adapter's input");
  visit("lora-target", o.lora.target, kRefuse,
        "Regular expression for the layers that get an adapter; it matches a layer's whole name or all of it "
        "after a dot (empty: attention)");
  visit("lora-weights", o.lora.weights, kRefuse,
        "Start from this adapter (PEFT, diffusers or kohya); it sets layers, ranks and scales");

  section("Data");
  visit("data", o.data.path, kHarmless,
        "Feature store (kiln extract), 'synthetic', or images with --autoencoder");
  visit("more-data", o.data.more, kHarmless,
        "Further feature stores of the same autoencoder to train on together with --data");
  visit("data-weights", o.data.weights, kRefuse,
        "How often samples of --data and of each of --more-data come in an epoch: 2 is twice (none: 1 each)");
  visit("autoencoder", o.data.autoencoder, kHarmless,
        "Encode images while training with this autoencoder, or 'pixels'");
  visit("text", o.data.text, kRefuse,
        "Name of the text store beside the features (empty: the only one, for models that take captions)");
  visit("text-dropout-prob", o.data.text_dropout_prob, kRefuse,
        "Probability of training without the caption");
  visit("text-encoder", o.data.text_encoder, kHarmless,
        "Folder of the text encoder for captions of pictures and for --sample-prompts (empty: the one that "
        "the text store names)");
  visit("text-max-tokens", o.data.captions.max_tokens, kRefuse,
        "Pictures: cut captions to this many tokens (0: depends on the encoder, 300 for T5 and Gemma)");
  visit("text-dtype", o.data.captions.dtype, kRefuse,
        "Pictures: precision of the captions' features, f32 | bf16 | fp16 (empty: fp16, for Gemma bf16)");
  visit("text-batch", o.data.captions.batch, kWarn,
        "Pictures: captions encoded at once (0: as many as images)");
  visit("text-encoder-memory", o.data.captions.memory, kHarmless,
        "Pictures: device memory that encoding captions may take (3G); an encoder that does not fit is read "
        "segment by segment in every step (empty: as much as it needs)");
  visit("captions", o.data.captions.sources, kRefuse,
        "Pictures: where captions come from, data (metadata.jsonl, .txt, .json, data_info.json) | png-text | "
        "file-names, or several with commas");
  visit("caption-prefix", o.data.captions.prefix, kRefuse, "Pictures: text before every caption");
  visit("caption-suffix", o.data.captions.suffix, kRefuse, "Pictures: text after every caption");
  visit("caption-instruction", o.data.captions.instruction, kRefuse,
        "Pictures: text, or a file of it, before every caption that Gemma encodes; its features are not "
        "kept, as in Sana");
  visit("out", o.out, kHarmless, "Run folder; rerunning the same command resumes, as does --out RUN alone");
  visit("image-size", o.data.image_size, kRefuse, "Image side in pixels");
  visit("buckets", o.data.buckets, kRefuse,
        "Pictures: bring each to the bucket with the nearest aspect ratio: pixart (the published table of "
        "--image-size 256, 512, 1024, 2048 or 2880) or sizes HxW,HxW,... (empty: all to --image-size)");
  visit("bucket-min", o.data.bucket_min, kRefuse,
        "Pictures: merge buckets of fewer pictures into the nearest other one");
  visit("enlarge", o.data.enlarge, kHarmless,
        "Enlarge images that are smaller than --image-size or their bucket, as DiT and PixArt do; otherwise "
        "they are left out");
  visit("flip", o.data.flip, kRefuse,
        "Mirror samples with probability 1/2: pictures, pixels, and stores of kiln extract --flip both");
  visit("draw-posterior", o.data.draw_posterior, kRefuse,
        "Draw latents from the autoencoder's posterior (otherwise use its mean)");
  visit("loader-threads", o.data.loader_threads, kHarmless, "Threads that prepare batches");
  visit("prefetch", o.data.prefetch, kHarmless, "Batches prepared ahead");

  section("Objective");
  visit("objective", o.objective.name, kRefuse,
        "Training objective: " + one_of(objective_names()) +
            " (default: that of the published models of --model, with its schedule)");
  visit("timestep-sampling", o.objective.timestep_sampling, kRefuse,
        "flow: how timesteps are drawn (empty: the objective's default)");
  visit("weighting", o.objective.weighting, kRefuse,
        "flow: how timesteps are weighted (empty: the objective's default)");
  visit("logit-mean", o.objective.logit_mean, kRefuse, "flow: mean of the logit-normal");
  visit("logit-std", o.objective.logit_std, kRefuse, "flow: standard deviation of the logit-normal");
  visit("flow-shift", o.objective.flow_shift, kRefuse, "flow: timestep shift towards noise");
  visit("flow-times", o.objective.flow_times, kRefuse,
        "flow: timesteps of any level of noise, or of the table of 1,000 that Sana's repository or diffusers "
        "trains on");
  visit("contrastive-weight", o.objective.contrastive_weight, kRefuse,
        "flow: weight of the distance from another sample's target, which contrastive flow matching enlarges "
        "(0: off)");
  visit("beta-schedule", o.objective.beta_schedule, kRefuse, "epsilon, v_prediction, x_0: how noise grows");
  visit("beta-start", o.objective.beta_start, kRefuse, "epsilon, v_prediction, x_0: the first beta");
  visit("beta-end", o.objective.beta_end, kRefuse, "epsilon, v_prediction, x_0: the last beta");
  visit("zero-terminal-snr", o.objective.zero_terminal_snr, kRefuse,
        "v_prediction, x_0: scale the schedule so that the last timestep is pure noise");
  visit("snr-gamma", o.objective.snr_gamma, kRefuse,
        "epsilon, v_prediction, x_0: min-SNR weighting (0: off)");
  visit("align-weight", o.objective.align_weight, kRefuse,
        "Weight of the alignment of a block's tokens with the clean picture, through a small network that "
        "trains with the model and is in none of its files (0: off)");
  visit("offset-noise", o.objective.offset_noise, kRefuse,
        "Add this much noise that is the same all over a channel of a sample (0: none; diffusers' "
        "--noise_offset)");
  visit("input-perturbation", o.objective.input_perturbation, kRefuse,
        "Add this much more noise to x_t than the model is to predict (0: none)");

  section("Length and batch");
  visit("max-steps", o.max_steps, kHarmless, "Stop after this many steps");
  visit("epochs", o.epochs, kHarmless,
        "Stop after this many passes over the data, instead of after --max-steps (0: off)");
  visit("max-minutes", o.max_minutes, kHarmless,
        "Stop after this much training time; cosine and linear learning rates follow it (0: off)");
  visit("global-batch", o.global_batch, kRefuse, "Images per step");
  visit("micro-batch", o.micro_batch, kWarn,
        "Images per pass; gradients of the passes are added up (0: the whole batch in one pass, -1: the "
        "fastest size that fits --memory-budget)");
  visit("seed", o.seed, kRefuse, "Seed of weights, order, noise and timesteps");

  section("Optimizer");
  visit("optimizer", o.optimizer.name, kRefuse, "Optimizer: " + one_of(optimizer_names()));
  visit("lr", o.lr.peak, kRefuse, "Highest learning rate");
  visit("beta1", o.optimizer.beta1, kRefuse, "Decay of the gradient mean; CAME: of the update's mean");
  visit("beta2", o.optimizer.beta2, kRefuse, "Decay of the squared gradient mean");
  visit("beta3", o.optimizer.beta3, kRefuse,
        "CAME: decay of the squared distance of updates from their mean");
  visit("adam-eps", o.optimizer.eps, kRefuse, "AdamW: epsilon");
  visit("came-eps", o.optimizer.came_eps, kRefuse,
        "CAME: added to squared gradients and to squared distances");
  visit("clip-threshold", o.optimizer.clip_threshold, kRefuse,
        "CAME: largest root mean square of a tensor's update");
  visit("weight-decay", o.optimizer.weight_decay, kRefuse, "Decoupled weight decay");
  visit("max-grad-norm", o.optimizer.max_grad_norm, kRefuse, "Clip the gradient to this norm (0: off)");
  visit("lr-schedule", o.lr.shape, kRefuse, "Shape of the learning rate over the run, after the warm-up");
  visit("lr-warmup-steps", o.lr.warmup_steps, kRefuse, "Steps of warm-up");
  visit("lr-warmup", o.lr.warmup, kRefuse, "Shape of the warm-up");
  visit("min-lr-ratio", o.lr.min_lr_ratio, kRefuse,
        "cosine, linear: the last learning rate as a share of --lr");
  visit("loss-scale", o.loss_scale.fixed_scale, kWarn, "fp16: a fixed loss scale (0: dynamic)");
  visit("loss-scale-initial", o.loss_scale.initial_scale, kWarn, "fp16: the dynamic loss scale at the start");
  visit("loss-scale-min", o.loss_scale.min_scale, kWarn, "fp16: the smallest dynamic loss scale");
  visit("loss-scale-window", o.loss_scale.growth_interval, kWarn,
        "fp16: finite steps after which the loss scale doubles");
  visit("loss-scale-hysteresis", o.loss_scale.hysteresis, kWarn,
        "fp16: overflows after which the loss scale halves; each overflow skips its step");
  visit("loss-scale-consecutive", o.loss_scale.consecutive_hysteresis, kWarn,
        "fp16: count only overflows in a row for the hysteresis");
  visit("ema-decay", o.ema.decays, kRefuse,
        "Decay of the weight average; several numbers keep several averages; none keeps no average");
  visit("ema-schedule", o.ema.schedule, kRefuse,
        "How the decay begins: constant, or with the warm-up of diffusers");
  visit("max-bad-steps", o.max_bad_steps, kHarmless,
        "Stop when more steps in a row than this have a loss or gradient that is not finite");

  section("Device and memory");
  visit("device", o.compute.device, kWarn, "Device to train on");
  visit("compute-dtype", o.compute.dtype, kWarn,
        "Precision of the computation (fp16 uses dynamic loss scaling; fp8 is bf16 with large products in "
        "fp8)");
  visit("master-dtype", o.compute.master_dtype, kWarn,
        "Precision of master weights: f32, or bf16 with updates rounded stochastically, which saves 4 bytes "
        "a weight (2 if the optimizer's state is offloaded)");
  visit("recompute", o.memory.recompute, kHarmless,
        "Activations to recompute in backward: none, all, or segments (0-5,8)");
  visit("offload-activations", o.memory.offload_activations, kHarmless,
        "Like --recompute, but keep the segments' inputs in host memory");
  visit("keep-gelu", o.memory.keep_gelu, kWarn,
        "Keep the result of GELU for backward instead of computing it again: faster, more memory (DiT)");
  visit("memory-budget", o.memory.budget, kHarmless,
        "Choose --recompute and --offload-activations to fit this much memory (12G), or auto (what is free)");
  visit("preflight", o.memory.preflight, kHarmless, "Refuse to start a run that by its plan does not fit");

  section("Several ranks");
  visit("nproc", o.ranks.nproc, kHarmless,
        "Start this many ranks on this machine (0: one, or what the launcher says)");
  visit("zero-stage", o.zero.stage, kWarn,
        "What to divide among the ranks. 1: optimizer state and EMA, 2: gradients too, 3: weights too (0: "
        "nothing)");
  visit("persist-threshold", o.zero.persist_threshold, kHarmless,
        "ZeRO stage 3: segments with fewer weights stay whole on every rank");
  visit("prefetch-segments", o.zero.prefetch_segments, kHarmless,
        "ZeRO stage 3: segments gathered ahead of the one that computes");
  visit("reduce-bucket-size", o.zero.reduce_bucket_size, kHarmless,
        "Largest number of gradient elements per reduction (0: a whole segment)");
  visit("shard-within-node", o.zero.shard_within_node, kHarmless,
        "Divide only among the ranks of each node; every node holds a copy");
  visit("reduce-dtype", o.zero.reduce_dtype, kWarn,
        "Precision in which gradients are summed over ranks (empty: the precision they have)");
  visit("collective-timeout", o.ranks.collective_timeout, kHarmless,
        "Seconds after which a stuck collective ends the run");

  section("Offload");
  visit("offload-optimizer", o.offload.optimizer, kWarn,
        "Where master weights, moments and EMA are kept: none (on the device), cpu (host memory) or nvme (a "
        "disk)");
  visit("offload-params", o.offload.params, kHarmless,
        "ZeRO stage 3: where compute weights wait to be gathered: none (on the device), cpu (host memory) or "
        "nvme (a disk)");
  visit("nvme-path", o.offload.nvme.folder, kHarmless, "nvme: folder on the disk");
  visit("nvme-queue-depth", o.offload.nvme.queue_depth, kHarmless, "nvme: requests in flight at once");
  visit("nvme-block-size", o.offload.nvme.block_bytes, kHarmless,
        "nvme: bytes of a request, a multiple of 4096");

  section("Arithmetic");
  visit("tf32", o.compute.tf32, kWarn, "CUDA: compute f32 products in TF32");
  visit("deterministic", o.compute.deterministic, kWarn,
        "CUDA: use only kernels that give the same bits each time");
  visit("cuda-graph", o.compute.cuda_graph, kHarmless,
        "CUDA: launch forward and backward as one graph; faster for models whose kernels are shorter than "
        "their launch");
  visit("untried-gpu", o.compute.untried_gpu, kWarn,
        "CUDA: take faster ways that have not run on a GPU yet: all (or no value), none (the default), or "
        "names with commas: update, products, packed-gradients, handed-on-branch, keep-gelu, of which the "
        "last keeps what memory is free for");
  visit("accumulate-f32", o.compute.accumulate_f32, kWarn,
        "Keep gradients in f32 even if nothing is accumulated");
  visit("emulate-fp8", o.compute.emulate_fp8, kWarn,
        "Emulate fp8 on hardware that lacks it: with its rounding, without its speed");
  visit("threads", o.compute.threads, kWarn, "Compute threads (0: all cores)");

  section("Checkpoints, logs, samples");
  visit("checkpoint-every", o.checkpoints.every, kHarmless, "Steps between checkpoints (0: only the last)");
  visit("keep-checkpoints", o.checkpoints.keep, kHarmless, "Newest checkpoints to keep (0: all)");
  visit("checkpoint-copy", o.checkpoints.copy, kHarmless,
        "Where a checkpoint's state is copied before training goes on");
  visit("log-every", o.watch.log_every, kHarmless, "Steps between lines of log.jsonl and the terminal");
  visit("validation-data", o.validation.data, kHarmless,
        "Samples that are not trained on, given like --data, to report their loss");
  visit("validation-share", o.validation.share, kRefuse,
        "Share of --data to hold out for validation, chosen by a hash of each sample's name (0.05: 5 %)");
  visit("validate-every", o.validation.every, kHarmless, "Steps between validations (0: only at the end)");
  visit("validation-images", o.validation.images, kHarmless, "Images of a validation (0: all)");
  visit("tensorboard", o.watch.tensorboard, kHarmless, "Write TensorBoard events");
  visit("peak-tflops", o.watch.peak_tflops, kHarmless,
        "Peak TFLOP/s of each rank's device, to report the share in use (0: measure it at the start)");
  visit("cost-per-hour", o.watch.cost_per_hour, kHarmless, "Price of the whole run, all ranks (0: unknown)");
  visit("price-per-gpu-hour", o.watch.price_per_gpu_hour, kHarmless,
        "Price of each GPU, or rank (0: unknown)");
  visit("profile", o.watch.profile, kHarmless, "Write a Chrome trace of steps FROM:TO into the run folder");
  visit("sample-every", o.samples.every, kHarmless, "Steps between sample grids (0: none)");
  visit("num-samples", o.samples.num_samples, kHarmless, "Images of a sample grid");
  visit("sampler", o.samples.sampler, kHarmless,
        fmt::format("Sampler of the grids and evaluations: {} (empty: sampler, steps and guidance of the "
                    "published models of --model; another sampler has its usual steps)",
                    one_of(sampler_names())));
  visit("num-sampling-steps", o.samples.num_sampling_steps, kHarmless, "Steps of the sampler");
  visit("cfg-scale", o.samples.cfg_scale, kHarmless, "Guidance scale of grids and evaluations (1: off)");
  visit("sample-classes", o.samples.classes, kHarmless, "Classes of the grids (none: spread over all)");
  visit("sample-prompts", o.samples.prompts, kHarmless,
        "Prompts of the grids, drawn in turn (none: captions of samples spread over all)");
  visit("evaluate-every", o.evaluation.every, kHarmless,
        "Steps between evaluations of drawn images (0: none)");
  visit("evaluate-images", o.evaluation.images, kHarmless, "Images of an evaluation, drawn as the grids are");
  visit("evaluate-reference", o.evaluation.reference, kHarmless,
        "Pictures or statistics to compare the drawn images with, as for kiln evaluate");
  visit("evaluate-net", o.evaluation.net, kHarmless, "Feature net: random, inception or dinov2");
  visit("evaluate-net-weights", o.evaluation.net_weights, kHarmless, "Weights of the feature net");
}

}  // namespace kiln
