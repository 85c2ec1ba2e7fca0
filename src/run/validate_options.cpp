// Checks the values of TrainOptions.
#include <fmt/ranges.h>
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <tuple>

#include "core/error.h"
#include "core/files/block_store.h"
#include "core/text/utf8.h"
#include "optim/optimizer.h"
#include "run/option_table.h"
#include "run/stage_options.h"

namespace kiln {

namespace {

void require(bool holds, std::string_view option, std::string_view expected, const auto& value) {
  if (!holds) fail("train", "--{} expects {}, got {}", option, expected, value);
}

// Throws Error for text that is not UTF-8, which config.toml and checkpoints could not hold.
void validate_text(const TrainOptions& o) {
  visit_options(o, [](const char* name, const auto& field, OnResume, const std::string&) {
    using T = std::remove_cvref_t<decltype(field)>;
    std::string text;
    if constexpr (std::is_same_v<T, std::string>)
      text = field;
    else if constexpr (TextOption<T>)
      text = option_text(field);
    if (!is_utf8(text))
      fail("train", "--{} expects UTF-8, got {:?}: rename it, or give a link with another name", name, text);
  });
}

// Values above `most` are typing errors that would fail in odd ways. Whole numbers beyond 64 bits arrive as
// the largest one.
struct Range {
  const char* option;
  int64_t value, least, most = std::numeric_limits<int64_t>::max();
};

void validate_counts(const TrainOptions& o) {
  constexpr int64_t kMillion = 1'000'000, kBillion = 1000 * kMillion;
  const Range ranges[] = {{"image-size", o.data.image_size, 1, 65536},
                          {"bucket-min", o.data.bucket_min, 1},
                          {"hidden-size", o.model.hidden_size, 0, kMillion},
                          {"depth", o.model.depth, 0, 10'000},
                          {"num-heads", o.model.num_heads, 0, kMillion},
                          {"patch-size", o.model.patch_size, 0, 65536},
                          {"num-classes", o.model.num_classes, 0, kBillion},
                          {"lora-rank", o.lora.rank, 0, 65536},
                          {"global-batch", o.global_batch, 1, kBillion},
                          {"max-steps", o.max_steps, 1},
                          {"max-bad-steps", o.max_bad_steps, 0},
                          {"text-max-tokens", o.data.captions.max_tokens, 0},
                          {"text-batch", o.data.captions.batch, 0, kMillion},
                          {"loader-threads", o.data.loader_threads, 1, 1024},
                          {"prefetch", o.data.prefetch, 1, kMillion},
                          {"threads", o.compute.threads, 0, 1024},
                          {"nproc", o.ranks.nproc, 0, 1024},
                          {"persist-threshold", o.zero.persist_threshold, 0},
                          {"prefetch-segments", o.zero.prefetch_segments, 0},
                          {"reduce-bucket-size", o.zero.reduce_bucket_size, 0},
                          {"log-every", o.watch.log_every, 1},
                          {"checkpoint-every", o.checkpoints.every, 0},
                          {"keep-checkpoints", o.checkpoints.keep, 0},
                          {"validate-every", o.validation.every, 0},
                          {"validation-images", o.validation.images, 0},
                          {"sample-every", o.samples.every, 0},
                          {"evaluate-every", o.evaluation.every, 0},
                          {"num-samples", o.samples.num_samples, 1, kMillion},
                          {"num-sampling-steps", o.samples.num_sampling_steps, 1, kMillion}};
  for (const auto& [option, value, least, most] : ranges) {
    require(value >= least, option, least > 0 ? "a positive number" : "0 or more", value);
    require(value <= most, option, fmt::format("{} at most", most), value);
  }
  require(o.micro_batch >= -1 && o.micro_batch <= o.global_batch, "micro-batch",
          fmt::format("0 to --global-batch ({}), or -1", o.global_batch), o.micro_batch);
  if (o.chooses_micro_batch() && !o.memory.budget.is_given())
    fail("train", "--micro-batch -1 chooses what fits a memory budget: give --memory-budget auto");
}

void validate_numbers(const TrainOptions& o) {
  for (const auto& [option, value] : {std::pair{"max-minutes", o.max_minutes},
                                      {"epochs", o.epochs},
                                      {"position-scale", o.model.position_scale},
                                      {"align-weight", o.objective.align_weight},
                                      {"offset-noise", o.objective.offset_noise},
                                      {"input-perturbation", o.objective.input_perturbation},
                                      {"lora-alpha", o.lora.alpha},
                                      {"peak-tflops", o.watch.peak_tflops},
                                      {"cost-per-hour", o.watch.cost_per_hour},
                                      {"price-per-gpu-hour", o.watch.price_per_gpu_hour}})
    require(value >= 0 && std::isfinite(value), option, "0 or more", value);
  require(o.validation.share >= 0 && o.validation.share < 1, "validation-share", "0 or more, below 1",
          o.validation.share);
  if (o.validation.share > 0 && !o.validation.data.empty())
    fail("train",
         "--validation-share holds samples of --data out, --validation-data gives others: leave one out");
  if (o.validation.share > 0 && o.data.is_synthetic())
    fail("train", "--validation-share has nothing to hold out of --data synthetic: leave it out");
  require(o.objective.contrastive_weight >= 0 && o.objective.contrastive_weight < 1, "contrastive-weight",
          "0 or more, below 1", o.objective.contrastive_weight);
  if (o.objective.contrastive_weight > 0 && o.global_batch < 2)
    fail("train", "--contrastive-weight compares the samples of a step: give --global-batch 2 or more");
  require(o.optimizer.max_grad_norm >= 0, "max-grad-norm", "0 or more", o.optimizer.max_grad_norm);
  require(o.data.text_dropout_prob >= 0 && o.data.text_dropout_prob < 1, "text-dropout-prob",
          "a number in [0, 1)", o.data.text_dropout_prob);
  require(o.model.class_dropout_prob >= 0 && o.model.class_dropout_prob < 1, "class-dropout-prob",
          "a number in [0, 1)", o.model.class_dropout_prob);
  require(std::isfinite(o.samples.cfg_scale), "cfg-scale", "a number", o.samples.cfg_scale);
  require(o.ranks.collective_timeout > 0, "collective-timeout", "a positive number of seconds",
          o.ranks.collective_timeout);
  require(o.zero.stage >= 0 && o.zero.stage <= 3, "zero-stage", "0, 1, 2 or 3", o.zero.stage);
  if (o.zero.reduce_dtype == at::kFloat8_e4m3fn)
    fail("train", "--reduce-dtype expects f32, bf16 or fp16, got fp8, which is only for large products");
  require(o.evaluation.images >= 8, "evaluate-images", "8 or more", o.evaluation.images);
  if (o.compute.master_dtype != at::kFloat && o.compute.master_dtype != at::kBFloat16)
    fail("train", "--master-dtype expects f32 or bf16, got {}", choice_name(o.compute.master_dtype));
  if (o.compute.master_dtype == at::kBFloat16 && o.compute.held_dtype() != at::kBFloat16)
    fail("train",
         "--master-dtype bf16 needs --compute-dtype bf16, got {}: the computation would use weights with "
         "more bits than are kept",
         choice_name(o.compute.dtype));
  if (o.compute.emulate_fp8 && !o.compute.is_fp8())
    fail("train", "--emulate-fp8 expects --compute-dtype fp8, got {}", choice_name(o.compute.dtype));
  if (o.watch.cost_per_hour > 0 && o.watch.price_per_gpu_hour > 0)
    fail("train", "--cost-per-hour and --price-per-gpu-hour both say what an hour costs: give one");
}

void validate_data(const TrainOptions& o) {
  require(!o.data.path.empty(), "data", "a feature store, 'synthetic' or a folder of images", "nothing");
  const size_t num_sources = 1 + o.data.more.size();
  for (const std::string& path : o.data.more)
    require(!path.empty(), "more-data", "feature stores", "nothing");
  for (const double weight : o.data.weights)
    require(weight > 0 && weight <= 1000, "data-weights", "numbers above 0, 1000 at most", weight);
  if (o.data.bucket_min > 1 && o.data.buckets.empty())
    fail("train", "--bucket-min {} has no effect without --buckets", o.data.bucket_min);
  if (!o.data.weights.empty() && o.data.weights.size() != num_sources)
    fail("train", "--data-weights expects {} numbers, one for --data and one for each of --more-data, got {}",
         num_sources, o.data.weights.size());
}

void validate_length(const TrainOptions& o) {
  if (o.epochs > 0 && o.max_steps != TrainOptions().max_steps)
    fail("train", "--epochs {:g} and --max-steps {} both say where training ends: give one", o.epochs,
         o.max_steps);
  if (o.stages.empty()) return;
  if (o.epochs > 0 || o.max_steps != TrainOptions().max_steps)
    fail("train", "--{} has no effect on a run of {} stages: give each [[stage]] its epochs or steps",
         o.epochs > 0 ? "epochs" : "max-steps", o.stages.size());
}

void validate_lora(const TrainOptions& o) {
  require(o.lora.dropout >= 0 && o.lora.dropout < 1, "lora-dropout", "a number in [0, 1)", o.lora.dropout);
  const bool describes = o.lora.alpha > 0 || !o.lora.target.empty();
  if (!o.lora.is_on() && (describes || o.lora.dropout > 0))
    fail("train", "--lora-alpha, --lora-dropout and --lora-target have no effect without --lora-rank");
  if (!o.lora.weights.empty() && (describes || o.lora.rank > 0))
    fail("train",
         "--lora-weights holds rank, alpha and layers: leave --lora-rank, --lora-alpha and "
         "--lora-target out");
  if (o.lora.is_on() && o.offload.params != Placement::kDevice)
    fail("train",
         "--offload-params has nothing to move for an adapter, whose base stays on the device: leave it out");
}

void validate_names(const TrainOptions& o) {
  for (const auto& [option, known, value] : {std::tuple{"objective", objective_names(), o.objective.name},
                                             {"optimizer", optimizer_names(), o.optimizer.name}})
    if (std::ranges::find(known, value) == known.end())
      fail("train", "--{} expects one of {}, got '{}'", option, fmt::join(known, ", "), value);
}

void validate_offload(const TrainOptions& o) {
  const Placement optimizer = o.offload.optimizer, params = o.offload.params;
  const BlockStoreOptions& nvme = o.offload.nvme;
  if (o.compute.cuda_graph && (optimizer != Placement::kDevice || !o.memory.offload_activations.is_none()))
    fail("train", "--cuda-graph needs all state and activations on the GPU: leave out the offload options");
  if (o.offload.uses_disk() && nvme.folder.empty())
    fail("train", "--{} nvme needs a folder on the disk: give --nvme-path DIR",
         optimizer == Placement::kNvme ? "offload-optimizer" : "offload-params");
  if (o.offload.uses_disk() && !std::filesystem::is_directory(nvme.folder))
    fail("train", "--nvme-path expects a folder that exists, got '{}'", nvme.folder);
  if (params != Placement::kDevice && o.zero.stage != 3)
    fail("train",
         "--offload-params {} needs --zero-stage 3, got {}: weights are whole on every rank below it",
         choice_name(params), o.zero.stage);
  require(nvme.queue_depth > 0 && nvme.queue_depth <= BlockStore::kMostQueueDepth, "nvme-queue-depth",
          fmt::format("1 to {}", BlockStore::kMostQueueDepth), nvme.queue_depth);
  require(nvme.block_bytes > 0 && nvme.block_bytes % BlockStore::kAlignment == 0 &&
              nvme.block_bytes <= BlockStore::kMostBlockBytes,
          "nvme-block-size",
          fmt::format("a multiple of {} up to {}", BlockStore::kAlignment, BlockStore::kMostBlockBytes),
          nvme.block_bytes);
}

}  // namespace

void validate(const TrainOptions& o) {
  validate_text(o);
  validate_length(o);
  for (size_t stage = 0; stage < o.stages.size(); ++stage) try {
      validate(options_of_stage(o, stage));
    } catch (const Error& error) {
      throw Error(fmt::format("{} ({})", error.what(), stage_name(o.stages[stage], stage)));
    }
  if (!o.stages.empty()) return;
  validate_data(o);
  require(!o.out.empty(), "out", "a run folder", "nothing");
  validate_counts(o);
  validate_numbers(o);
  validate_names(o);
  validate_lora(o);
  validate(o.lr);
  validate(o.loss_scale);
  validate(o.ema);
  validate_offload(o);
  objective_config_of(o.objective);
  optimizer_config_of(o.optimizer);
}

}  // namespace kiln
