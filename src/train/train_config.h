// The options of `kiln train`: one field each, with the same name on the command line, in a recipe and in
// config.toml.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "optim/loss_scaler.h"
#include "optim/lr_schedule.h"

namespace kiln {

struct TrainOptions {
  std::string model = "DiT-S/2", model_config;
  int64_t hidden_size = 0, depth = 0, num_heads = 0, patch_size = 0;
  double class_dropout_prob = 0.1;
  int64_t num_classes = 0;
  std::string weights;

  std::string data, autoencoder, out;
  int64_t image_size = 256;
  bool enlarge = false, flip = true, draw_posterior = true;
  int64_t loader_threads = 1, prefetch = 4;

  std::string objective = "iddpm", timestep_sampling, weighting;
  double logit_mean = 0, logit_std = 1, flow_shift = 1, snr_gamma = 0;

  int64_t max_steps = 400000;
  double max_minutes = 0;
  int64_t global_batch = 256, micro_batch = 0;
  uint64_t seed = 0;

  std::string optimizer = "adamw";
  double lr = 1e-4, beta1 = 0.9, beta2 = 0.999, adam_eps = 1e-8, weight_decay = 0, max_grad_norm = 0;
  std::string lr_schedule = "constant", lr_warmup = "linear";
  int64_t lr_warmup_steps = 0;
  double min_lr_ratio = 0;
  double loss_scale = 0, loss_scale_initial = 65536, loss_scale_min = 1;
  int64_t loss_scale_window = 1000, loss_scale_hysteresis = 1;
  bool loss_scale_consecutive = false;
  std::vector<double> ema_decay = {0.9999};
  std::string ema_schedule = "constant";
  int64_t max_bad_steps = 10;

  std::string device = "auto", compute_dtype = "f32", recompute = "none", offload_activations = "none",
              memory_budget;
  bool preflight = true;
  int64_t nproc = 0, zero_stage = 0, persist_threshold = 0, prefetch_segments = 1, reduce_bucket_size = 0;
  bool shard_within_node = false;
  std::string reduce_dtype;
  double collective_timeout = 1800;
  std::string offload_optimizer = "none", offload_params = "none", nvme_path;
  int64_t nvme_queue_depth = 32, nvme_block_size = 1 << 20;
  bool tf32 = false, deterministic = false, accumulate_f32 = false;
  int64_t threads = 0;

  int64_t checkpoint_every = 5000, keep_checkpoints = 0;
  std::string checkpoint_copy = "auto";
  int64_t log_every = 100;
  std::string validation_data;
  int64_t validate_every = 5000, validation_images = 0;
  bool tensorboard = true;
  double peak_tflops = 0, cost_per_hour = 0, price_per_gpu_hour = 0;
  std::string profile;
  int64_t sample_every = 0, num_samples = 8, num_sampling_steps = 50;
  std::string sampler;
  double cfg_scale = 4;
  std::vector<int64_t> sample_classes;
};

// What a changed option does to a run that resumes.
enum class OnResume {
  kRefuse,    // another run: start it in another folder
  kWarn,      // the same run with other rounding
  kHarmless,  // stops, logs, saves or samples differently
};

// Calls visitor(name, field, on_resume, help) for every option: the one table behind --help, recipes,
// config.toml and the comparison at a resume. A visitor with section(title) is told where a group begins.
template <class Options, class Visitor>
void visit_options(Options& o, Visitor&& visit) {
  using enum OnResume;
  const auto section = [&](const char* title) {
    if constexpr (requires { visit.section(title); }) visit.section(title);
  };
  section("Model");
  visit("model", o.model, kRefuse, "Model name: DiT-{S,B,L,XL}/{2,4,8}, or dit with a width of your own");
  visit("model-config", o.model_config, kRefuse,
        "Further model settings as JSON (text or file), over the model's preset");
  visit("hidden-size", o.hidden_size, kRefuse, "Width of the transformer (0: the model's)");
  visit("depth", o.depth, kRefuse, "Number of blocks (0: the model's)");
  visit("num-heads", o.num_heads, kRefuse, "Attention heads (0: the model's)");
  visit("patch-size", o.patch_size, kRefuse, "Patch side in latent pixels (0: the model's)");
  visit("class-dropout-prob", o.class_dropout_prob, kRefuse,
        "Probability of training without the class label");
  visit("num-classes", o.num_classes, kRefuse,
        "Classes of the model (0: those of the data; synthetic: 1000)");
  visit("weights", o.weights, kRefuse, "Start from these weights instead of fresh ones");

  section("Data");
  visit("data", o.data, kHarmless, "Feature store (kiln extract), 'synthetic', or images with --autoencoder");
  visit("autoencoder", o.autoencoder, kHarmless,
        "Encode images while training with this autoencoder, or 'pixels'");
  visit("out", o.out, kHarmless, "Run folder; rerunning the same command resumes");
  visit("image-size", o.image_size, kRefuse, "Image side in pixels");
  visit("enlarge", o.enlarge, kHarmless,
        "Images: enlarge those smaller than --image-size, as DiT does (else they end the run)");
  visit("flip", o.flip, kRefuse, "Mirror samples with probability 1/2 where the data allow it");
  visit("draw-posterior", o.draw_posterior, kRefuse,
        "Draw latents from the autoencoder's posterior (else its mean)");
  visit("loader-threads", o.loader_threads, kHarmless, "Threads that draw batches ahead");
  visit("prefetch", o.prefetch, kHarmless, "Batches drawn ahead");

  section("Objective");
  visit("objective", o.objective, kRefuse, "iddpm (DiT's), epsilon, v_prediction, x_0 or flow");
  visit("timestep-sampling", o.timestep_sampling, kRefuse,
        "flow: uniform or logit_normal (empty: the objective's)");
  visit("weighting", o.weighting, kRefuse, "flow: none or cosmap (empty: the objective's)");
  visit("logit-mean", o.logit_mean, kRefuse, "flow: mean of the logit-normal");
  visit("logit-std", o.logit_std, kRefuse, "flow: standard deviation of the logit-normal");
  visit("flow-shift", o.flow_shift, kRefuse, "flow: timestep shift towards noise");
  visit("snr-gamma", o.snr_gamma, kRefuse, "epsilon, v_prediction, x_0: min-SNR weighting (0: off)");

  section("Length and batch");
  visit("max-steps", o.max_steps, kHarmless, "Stop after this many steps");
  visit("max-minutes", o.max_minutes, kHarmless,
        "Stop after this much training time; cosine and linear lr follow it (0: off)");
  visit("global-batch", o.global_batch, kRefuse, "Images per step");
  visit("micro-batch", o.micro_batch, kWarn,
        "Images per pass; the rest is accumulated (0: the whole batch, -1: what fits --memory-budget best)");
  visit("seed", o.seed, kRefuse, "Seed of weights, order, noise and timesteps");

  section("Optimizer");
  visit("optimizer", o.optimizer, kRefuse, "adamw");
  visit("lr", o.lr, kRefuse, "Highest learning rate");
  visit("beta1", o.beta1, kRefuse, "AdamW: decay of the gradient mean");
  visit("beta2", o.beta2, kRefuse, "AdamW: decay of the squared gradient mean");
  visit("adam-eps", o.adam_eps, kRefuse, "AdamW: epsilon");
  visit("weight-decay", o.weight_decay, kRefuse, "AdamW: decoupled weight decay");
  visit("max-grad-norm", o.max_grad_norm, kRefuse, "Clip the gradient to this norm (0: off)");
  visit("lr-schedule", o.lr_schedule, kRefuse, "constant, cosine or linear, times the warm-up");
  visit("lr-warmup-steps", o.lr_warmup_steps, kRefuse, "Steps of warm-up");
  visit("lr-warmup", o.lr_warmup, kRefuse, "Shape of the warm-up: linear, or log");
  visit("min-lr-ratio", o.min_lr_ratio, kRefuse, "cosine, linear: the last learning rate as a share of --lr");
  visit("loss-scale", o.loss_scale, kWarn, "fp16: a fixed loss scale (0: dynamic)");
  visit("loss-scale-initial", o.loss_scale_initial, kWarn, "fp16: the dynamic loss scale at the start");
  visit("loss-scale-min", o.loss_scale_min, kWarn, "fp16: the dynamic loss scale never falls below");
  visit("loss-scale-window", o.loss_scale_window, kWarn,
        "fp16: finite steps after which the loss scale doubles");
  visit("loss-scale-hysteresis", o.loss_scale_hysteresis, kWarn,
        "fp16: overflows until the loss scale halves; every one costs its step");
  visit("loss-scale-consecutive", o.loss_scale_consecutive, kWarn,
        "fp16: only overflows in a row count for the hysteresis");
  visit("ema-decay", o.ema_decay, kRefuse,
        "Decay of the weight average; several make several averages; none");
  visit("ema-schedule", o.ema_schedule, kRefuse, "constant, or diffusers' warm-up of the decay");
  visit("max-bad-steps", o.max_bad_steps, kHarmless, "Stop after more non-finite steps than this in a row");

  section("Device and memory");
  visit("device", o.device, kWarn, "auto, cpu or cuda");
  visit("compute-dtype", o.compute_dtype, kWarn,
        "f32, bf16 or fp16 (with dynamic loss scaling); masters are f32");
  visit("recompute", o.recompute, kHarmless,
        "Activations to recompute in backward: none, all, or segments: 0-5,8");
  visit("offload-activations", o.offload_activations, kHarmless,
        "Like --recompute, with the segments' inputs in host memory meanwhile");
  visit("memory-budget", o.memory_budget, kHarmless,
        "Choose --recompute and --offload-activations so that it fits: bytes (12G) or auto");
  visit("preflight", o.preflight, kHarmless, "Refuse before it starts what the plan says cannot fit");

  section("Several ranks");
  visit("nproc", o.nproc, kHarmless,
        "Start this many ranks on this machine (0: one, or what the launcher says)");
  visit("zero-stage", o.zero_stage, kWarn,
        "Divide among the ranks: 1 optimizer state and EMA, 2 gradients too, 3 weights too (0: nothing)");
  visit("persist-threshold", o.persist_threshold, kHarmless,
        "Stage 3: segments with fewer weights stay whole on every rank");
  visit("prefetch-segments", o.prefetch_segments, kHarmless,
        "Stage 3: segments gathered ahead of the one that computes");
  visit("reduce-bucket-size", o.reduce_bucket_size, kHarmless,
        "Elements of gradients per reduction at most (0: a segment's at once)");
  visit("shard-within-node", o.shard_within_node, kHarmless,
        "Divide among the ranks of a node only; nodes hold copies");
  visit("reduce-dtype", o.reduce_dtype, kWarn,
        "Sum gradients over ranks in f32, bf16 or fp16 (empty: the dtype they have)");
  visit("collective-timeout", o.collective_timeout, kHarmless,
        "Seconds after which a stuck collective ends the run");

  section("Offload");
  visit("offload-optimizer", o.offload_optimizer, kWarn,
        "Where master weights, moments and EMA live: none (the device), cpu or nvme");
  visit("offload-params", o.offload_params, kHarmless,
        "Stage 3: where compute weights wait to be gathered: none (the device), cpu or nvme");
  visit("nvme-path", o.nvme_path, kHarmless, "Folder on the disk that nvme offloads to");
  visit("nvme-queue-depth", o.nvme_queue_depth, kHarmless, "nvme: requests under way at once");
  visit("nvme-block-size", o.nvme_block_size, kHarmless, "nvme: bytes of a request, a multiple of 4096");

  section("Arithmetic");
  visit("tf32", o.tf32, kWarn, "CUDA: f32 products in TF32");
  visit("deterministic", o.deterministic, kWarn, "CUDA: only kernels that give the same bits each time");
  visit("accumulate-f32", o.accumulate_f32, kWarn, "f32 gradients even where nothing is accumulated");
  visit("threads", o.threads, kWarn, "Compute threads (0: all cores)");

  section("Checkpoints, logs, samples");
  visit("checkpoint-every", o.checkpoint_every, kHarmless, "Steps between checkpoints (0: only the last)");
  visit("keep-checkpoints", o.keep_checkpoints, kHarmless, "Newest checkpoints to keep (0: all)");
  visit("checkpoint-copy", o.checkpoint_copy, kHarmless,
        "Where a checkpoint's state is copied before training goes on: memory, page-cache or auto");
  visit("log-every", o.log_every, kHarmless, "Steps between lines of log.jsonl and the terminal");
  visit("validation-data", o.validation_data, kHarmless,
        "Samples that are not trained on, as --data; their loss is told");
  visit("validate-every", o.validate_every, kHarmless, "Steps between validations (0: only at the end)");
  visit("validation-images", o.validation_images, kHarmless, "Images of a validation (0: all)");
  visit("tensorboard", o.tensorboard, kHarmless, "Write TensorBoard events");
  visit("peak-tflops", o.peak_tflops, kHarmless,
        "The machine's peak for the share of it (0: measured at the start)");
  visit("cost-per-hour", o.cost_per_hour, kHarmless, "Price of the whole run, all ranks (0: unknown)");
  visit("price-per-gpu-hour", o.price_per_gpu_hour, kHarmless, "The same by its GPUs, or ranks (0: unknown)");
  visit("profile", o.profile, kHarmless, "Write a Chrome trace of steps FROM:TO into the run folder");
  visit("sample-every", o.sample_every, kHarmless, "Steps between sample grids (0: none)");
  visit("num-samples", o.num_samples, kHarmless, "Images of a sample grid");
  visit("sampler", o.sampler, kHarmless, "Sampler of the grids (empty: the objective's)");
  visit("num-sampling-steps", o.num_sampling_steps, kHarmless, "Sampler steps of the grids");
  visit("cfg-scale", o.cfg_scale, kHarmless, "Guidance of the grids (1: off)");
  visit("sample-classes", o.sample_classes, kHarmless, "Classes of the grids (none: spread over all)");
}

// Sets one option from a recipe's value. Throws Error: unknown name (the nearest one is told), wrong type.
void set_option(TrainOptions& options, const std::string& name, const nlohmann::json& value);

// Refuses impossible values by option name and what to do. Throws Error.
void validate(const TrainOptions& options);
// --micro-batch -1: the plan chooses what fits --memory-budget.
inline bool chooses_micro_batch(const TrainOptions& options) { return options.micro_batch == -1; }

// What an hour of the run costs; 0: nobody knows.
inline double cost_per_hour_of(const TrainOptions& options, int64_t world_size) {
  return options.cost_per_hour + options.price_per_gpu_hour * static_cast<double>(world_size);
}

// {"max-steps": 400000, ...}: every option.
nlohmann::json to_json(const TrainOptions& options);
// The same as a recipe that can be given back with --recipe.
std::string to_toml(const TrainOptions& options);

// Names of options that differ between a saved run and this command, by what they do to it.
struct OptionChanges {
  std::vector<std::string> refused, warned;  // "lr (0.0001 -> 0.0002)"
};
OptionChanges compare_options(const nlohmann::json& saved, const nlohmann::json& now);

// What the options say of the learning rate and of fp16's loss scale.
LrSchedule lr_schedule_of(const TrainOptions& options);
LossScalerOptions loss_scaler_options_of(const TrainOptions& options);

// The configs behind --objective, --optimizer and their settings. Settings that would have no effect are
// refused.
nlohmann::json objective_config_of(const TrainOptions& options);
nlohmann::json optimizer_config_of(const TrainOptions& options);

}  // namespace kiln
