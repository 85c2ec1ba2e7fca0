#include "interop/deepspeed_keys.h"

#include <fmt/format.h>

#include <cmath>
#include <vector>

#include "core/error.h"

namespace kiln {

namespace {

using nlohmann::json;
using enum DeepSpeedKey::Effect;

json as_integer(const json& value) {  // people write 5e7 for 50000000
  if (!value.is_number_float()) return value;
  const double number = value.get<double>();
  return number == std::floor(number) && std::abs(number) < 9e15 ? json(static_cast<int64_t>(number)) : value;
}

json fp16_if(const json& value) { return value == true ? json("fp16") : json(); }
json bf16_if(const json& value) { return value == true ? json("bf16") : json(); }
json cpu_if(const json& value) { return value == true ? json("cpu") : json(); }
json all_if(const json& value) { return value == true ? json("all") : json(); }
json power_of_two(const json& value) {
  return value.is_number() ? json(std::exp2(value.get<double>())) : value;
}

json dtype_name(const json& value) {
  for (const auto& [theirs, ours] :
       {std::pair{"fp32", "f32"}, {"fp16", "fp16"}, {"bf16", "bf16"}, {"bfp16", "bf16"}})
    if (value == theirs) return ours;
  return value;
}

json f32_accumulation(const json& value) { return value == "fp32" ? json(true) : json(); }

json no_prefetch(const json& value) { return value == 0 ? json(0) : json(); }

const std::vector<DeepSpeedKey>& table() {
  static const std::vector<DeepSpeedKey> kTable = {
      {"train_batch_size",
       kTogether,
       "global-batch",
       {},
       "= micro-batch x accumulation x ranks: two give the third; a contradiction is refused"},
      {"train_micro_batch_size_per_gpu", kTogether, "micro-batch", {}, "see `train_batch_size`"},
      {"gradient_accumulation_steps", kTogether, "micro-batch", {}, "see `train_batch_size`"},

      {"optimizer.type",
       kTogether,
       "optimizer",
       {},
       "`AdamW`, or `Adam` as in DeepSpeed, where it is AdamW unless `adam_w_mode` says otherwise; others "
       "refused"},
      {"optimizer.params.lr", kOption, "lr"},
      {"optimizer.params.betas", kTogether, "beta1", {}, "sets `--beta1` and `--beta2`"},
      {"optimizer.params.eps", kOption, "adam-eps"},
      {"optimizer.params.weight_decay", kOption, "weight-decay"},
      {"optimizer.params.adam_w_mode", kOnly, nullptr, true, "weight decay is decoupled"},
      {"optimizer.params.bias_correction", kOnly, nullptr, true, "AdamW corrects the bias"},
      {"optimizer.params.amsgrad", kOnly, nullptr, false, "AdamW has no AMSGrad"},
      {"optimizer.params.torch_adam", kNoEffect, nullptr, {}, "one fused AdamW serves every device"},
      {"optimizer.params.fp32_optimizer_states", kOnly, nullptr, true, "moments are f32"},
      {"optimizer.legacy_fusion", kNoEffect, nullptr, {}, "one fused AdamW serves every device"},
      {"zero_allow_untested_optimizer",
       kNoEffect,
       nullptr,
       {},
       "every optimizer of Kiln is tested at every stage"},
      {"zero_force_ds_cpu_optimizer", kNoEffect, nullptr, {}, "the optimizer on the host is Kiln's own"},

      {"scheduler.type",
       kTogether,
       "lr-schedule",
       {},
       "`WarmupLR` constant, `WarmupDecayLR` linear, `WarmupCosineLR` cosine, the decay along the whole run, "
       "the warm-up "
       "included; `OneCycle` and `LRRangeTest` refused"},
      {"scheduler.params.warmup_max_lr", kOption, "lr"},
      {"scheduler.params.warmup_min_lr", kAlways, nullptr, 0, "the warm-up begins near 0"},
      {"scheduler.params.warmup_min_ratio", kAlways, nullptr, 0, "the warm-up begins near 0"},
      {"scheduler.params.warmup_num_steps", kOption, "lr-warmup-steps", {}, "", as_integer},
      {"scheduler.params.warmup_type", kOption, "lr-warmup", {}, "absent: log, as in DeepSpeed"},
      {"scheduler.params.total_num_steps",
       kOption,
       "max-steps",
       {},
       "the schedule ends where the run ends",
       as_integer},
      {"scheduler.params.cos_min_ratio", kOption, "min-lr-ratio"},
      {"scheduler.params.last_batch_iteration", kNoEffect, nullptr, {}, "a run resumes from its checkpoints"},

      {"fp16.enabled",
       kOption,
       "compute-dtype",
       {},
       "true: fp16; false leaves the option alone, and the section",
       fp16_if},
      {"fp16.auto_cast", kNoEffect, nullptr, {}, "inputs are cast to the compute dtype where it is used"},
      {"fp16.loss_scale", kOption, "loss-scale"},
      {"fp16.initial_scale_power", kOption, "loss-scale-initial", {}, "2 to this power", power_of_two},
      {"fp16.loss_scale_window", kOption, "loss-scale-window", {}, "", as_integer},
      {"fp16.hysteresis", kOption, "loss-scale-hysteresis", {}, "", as_integer},
      {"fp16.consecutive_hysteresis", kOption, "loss-scale-consecutive"},
      {"fp16.min_loss_scale", kOption, "loss-scale-min"},
      {"fp16.fp16_master_weights_and_grads", kOnly, nullptr, false, "beside fp16 master weights are f32"},
      {"bf16.enabled",
       kOption,
       "compute-dtype",
       {},
       "true: bf16; false leaves the option alone, and the section",
       bf16_if},
      {"bf16.check_grad_overflow", kAlways, nullptr, true, "a step that is not finite is skipped"},
      {"bf16.immediate_grad_update",
       kNoEffect,
       nullptr,
       {},
       "gradients of a segment are written into its flat buffer at once"},
      {"bf16.bf16_master_weights_and_grads",
       kOption,
       "master-dtype",
       {},
       "true: bf16, rounded stochastically; gradients are bf16 already where nothing is accumulated; false "
       "leaves the option alone",
       bf16_if},
      {"bf16.bf16_optimizer_states", kOnly, nullptr, false, "moments are f32"},
      {"amp", kSection, nullptr, false, "Apex is not used: enable bf16 or fp16"},
      {"torch_autocast", kSection, nullptr, false, "there is no autocast: enable bf16 or fp16"},
      {"data_types.grad_accum_dtype",
       kOption,
       "accumulate-f32",
       {},
       "fp32: true; else without effect: micro-steps are accumulated in f32",
       f32_accumulation},
      {"communication_data_type", kOption, "reduce-dtype", {}, "fp32, fp16, bf16", dtype_name},
      {"seq_parallel_communication_data_type", kNoEffect, nullptr, {}, "there is no sequence parallelism"},

      {"gradient_clipping", kOption, "max-grad-norm"},
      {"prescale_gradients", kAlways, nullptr, false,
       "the loss is divided by the global batch before the backward pass"},
      {"gradient_predivide_factor", kAlways, nullptr, 1,
       "the loss is divided by the global batch before the backward pass"},
      {"sparse_gradients", kAlways, nullptr, false, "gradients are dense"},
      {"disable_allgather", kAlways, nullptr, false, "weights are gathered as the stage needs"},
      {"dataloader_drop_last",
       kNoEffect,
       nullptr,
       {},
       "the stream of samples has no end: every batch is whole"},

      {"zero_optimization.stage", kOption, "zero-stage"},
      {"zero_optimization.contiguous_gradients", kAlways, nullptr, true,
       "gradients of a segment lie in one flat buffer"},
      {"zero_optimization.reduce_scatter", kAlways, nullptr, true,
       "stages 2 and 3 reduce-scatter, 0 and 1 all-reduce"},
      {"zero_optimization.reduce_bucket_size", kOption, "reduce-bucket-size", {}, "", as_integer},
      {"zero_optimization.use_multi_rank_bucket_allreduce",
       kNoEffect,
       nullptr,
       {},
       "each segment is reduced by itself"},
      {"zero_optimization.allgather_partitions", kAlways, nullptr, true, "weights are all-gathered"},
      {"zero_optimization.allgather_bucket_size",
       kNoEffect,
       nullptr,
       {},
       "each segment is gathered by itself"},
      {"zero_optimization.overlap_comm", kAlways, nullptr, true,
       "the reduction of a segment overlaps the backward pass of the next"},
      {"zero_optimization.round_robin_gradients",
       kNoEffect,
       nullptr,
       {},
       "every rank keeps a slice of every segment: all work alike"},
      {"zero_optimization.sub_group_size", kNoEffect, nullptr, {}, "the optimizer steps segment by segment"},
      {"zero_optimization.stage3_prefetch_bucket_size",
       kOption,
       "prefetch-segments",
       {},
       "0: none; else `--prefetch-segments`, which counts segments",
       no_prefetch},
      {"zero_optimization.stage3_param_persistence_threshold",
       kOption,
       "persist-threshold",
       {},
       "compared with the weights of a segment, not of a tensor",
       as_integer},
      {"zero_optimization.stage3_model_persistence_threshold",
       kNoEffect,
       nullptr,
       {},
       "`--persist-threshold` alone decides"},
      {"zero_optimization.stage3_max_live_parameters",
       kNoEffect,
       nullptr,
       {},
       "1 + `--prefetch-segments` segments are whole at once, no more"},
      {"zero_optimization.stage3_max_reuse_distance",
       kNoEffect,
       nullptr,
       {},
       "a segment is released after its forward pass; `stage3_max_reuse_parameters` is read as this key"},
      {"zero_optimization.stage3_gather_16bit_weights_on_model_save",
       kNoEffect,
       nullptr,
       {},
       "`kiln convert` makes one file of any checkpoint"},
      {"zero_optimization.stage3_module_granularity_threshold",
       kNoEffect,
       nullptr,
       {},
       "segments are gathered whole"},
      {"zero_optimization.stage3_use_all_reduce_for_fetch_params",
       kNoEffect,
       nullptr,
       {},
       "segments are all-gathered"},
      {"zero_optimization.stage3_allgather_sequential",
       kNoEffect,
       nullptr,
       {},
       "segments are gathered in the order of the walk"},
      {"zero_optimization.memory_efficient_linear",
       kNoEffect,
       nullptr,
       {},
       "gradients of linear layers are Kiln's own"},
      {"zero_optimization.load_from_fp32_weights", kAlways, nullptr, true,
       "a resume starts from the masters"},
      {"zero_optimization.elastic_checkpoint",
       kNoEffect,
       nullptr,
       {},
       "a checkpoint resumes on any number of ranks"},
      {"zero_optimization.ignore_unused_parameters",
       kNoEffect,
       nullptr,
       {},
       "every weight of a segment has its place"},
      {"zero_optimization.legacy_stage1", kNoEffect, nullptr, {}, "there is one stage 1"},
      {"zero_optimization.zero_hpz_partition_size", kOnly, nullptr, 1, "see `--shard-within-node`"},
      {"zero_optimization.zero_quantized_weights", kOnly, nullptr, false,
       "weights are sent in the compute dtype"},
      {"zero_optimization.zero_quantized_nontrainable_weights", kOnly, nullptr, false,
       "weights are sent in the compute dtype"},
      {"zero_optimization.zero_quantized_gradients", kOnly, nullptr, false,
       "gradients are sent in `--reduce-dtype`"},

      {"zero_optimization.offload_optimizer.device", kOption, "offload-optimizer"},
      {"zero_optimization.offload_optimizer.nvme_path",
       kTogether,
       "nvme-path",
       {},
       "where its device is nvme"},
      {"zero_optimization.offload_optimizer.pin_memory", kAlways, nullptr, true,
       "host memory is pinned where a GPU is"},
      {"zero_optimization.offload_optimizer.buffer_count",
       kNoEffect,
       nullptr,
       {},
       "segments are read, stepped and written in a pipeline"},
      {"zero_optimization.offload_optimizer.pipeline_read", kAlways, nullptr, true,
       "segments are read, stepped and written in a pipeline"},
      {"zero_optimization.offload_optimizer.pipeline_write", kAlways, nullptr, true,
       "segments are read, stepped and written in a pipeline"},
      {"zero_optimization.offload_optimizer.fast_init",
       kNoEffect,
       nullptr,
       {},
       "the state starts in its place"},
      {"zero_optimization.offload_optimizer.ratio", kAlways, nullptr, 1, "all of the state is offloaded"},
      {"zero_optimization.offload_optimizer.super_offload", kOnly, nullptr, false,
       "the step is never speculative"},
      {"zero_optimization.offload_optimizer.cpuadam_cores_perc",
       kNoEffect,
       nullptr,
       {},
       "`--threads` says how many cores compute"},
      {"zero_optimization.offload_param.device", kOption, "offload-params"},
      {"zero_optimization.offload_param.nvme_path", kTogether, "nvme-path", {}, "where its device is nvme"},
      {"zero_optimization.offload_param.pin_memory", kAlways, nullptr, true,
       "host memory is pinned where a GPU is"},
      {"zero_optimization.offload_param.buffer_count",
       kNoEffect,
       nullptr,
       {},
       "segments come and go one by one"},
      {"zero_optimization.offload_param.buffer_size",
       kNoEffect,
       nullptr,
       {},
       "segments come and go one by one"},
      {"zero_optimization.offload_param.max_in_cpu",
       kNoEffect,
       nullptr,
       {},
       "in memory are the segments that are gathered, and one that is read meanwhile"},
      {"zero_optimization.cpu_offload", kOption, "offload-optimizer", {}, "deprecated; true: cpu", cpu_if},
      {"zero_optimization.cpu_offload_param", kOption, "offload-params", {}, "deprecated; true: cpu", cpu_if},
      {"zero_optimization.cpu_offload_use_pin_memory", kAlways, nullptr, true,
       "host memory is pinned where a GPU is"},
      {"aio.block_size", kOption, "nvme-block-size", {}, "", as_integer},
      {"aio.queue_depth", kOption, "nvme-queue-depth", {}, "", as_integer},
      {"aio.intra_op_parallelism", kNoEffect, nullptr, {}, "io_uring needs one thread"},
      {"aio.thread_count", kNoEffect, nullptr, {}, "io_uring needs one thread"},
      {"aio.single_submit", kNoEffect, nullptr, {}, "blocks are submitted as the queue has room"},
      {"aio.overlap_events", kAlways, nullptr, true, "requests complete in any order"},
      {"aio.use_gds", kOnly, nullptr, false, "blocks pass through host memory"},

      {"activation_checkpointing.partition_activations",
       kNoEffect,
       nullptr,
       {},
       "no two ranks hold the same activations"},
      {"activation_checkpointing.cpu_checkpointing",
       kOption,
       "offload-activations",
       {},
       "true: all segments, which are recomputed",
       all_if},
      {"activation_checkpointing.contiguous_memory_optimization",
       kNoEffect,
       nullptr,
       {},
       "inputs of segments are single tensors"},
      {"activation_checkpointing.number_checkpoints", kNoEffect, nullptr, {}, "`--recompute` names segments"},
      {"activation_checkpointing.synchronize_checkpoint_boundary",
       kNoEffect,
       nullptr,
       {},
       "copies are ordered by events"},
      {"activation_checkpointing.profile", kNoEffect, nullptr, {}, "the log has the time of every phase"},

      {"steps_per_print", kOption, "log-every", {}, "", as_integer},
      {"wall_clock_breakdown",
       kFree,
       nullptr,
       {},
       "the log has the time of every phase; measuring it costs nothing"},
      {"memory_breakdown", kNoEffect, nullptr, {}, "the log and the report have the memory by kind"},
      {"dump_state", kNoEffect, nullptr, {}, "the run folder's config.toml has every option"},
      {"tensorboard.enabled", kOption, "tensorboard"},
      {"tensorboard.output_path", kNoEffect, nullptr, {}, "events are written into the run folder"},
      {"tensorboard.job_name", kNoEffect, nullptr, {}, "events are written into the run folder"},
      {"wandb", kSection, nullptr, {}, "the run folder has log.jsonl and TensorBoard events"},
      {"comet", kSection, nullptr, {}, "the run folder has log.jsonl and TensorBoard events"},
      {"csv_monitor", kSection, nullptr, {}, "the run folder has log.jsonl and TensorBoard events"},
      {"comms_logger", kSection, nullptr, {}, "the log has the time of communication"},
      {"flops_profiler", kSection, nullptr, {}, "the log has TFLOP/s; `--profile` writes a trace"},
      {"checkpoint.tag_validation", kNoEffect, nullptr, {}, "ranks agree on a checkpoint before it counts"},
      {"checkpoint.load_universal",
       kNoEffect,
       nullptr,
       {},
       "a checkpoint resumes on any stage and number of ranks"},
      {"checkpoint.use_node_local_storage", kNoEffect, nullptr, {}, "all ranks write into one run folder"},
      {"checkpoint.parallel_write", kSection, nullptr, {}, "every rank writes its part"},
      {"elasticity", kSection, nullptr, false,
       "batch sizes stay as given; a run resumes on any number of ranks"},
      {"autotuning", kSection, nullptr, false, "use `kiln plan`"},
      {"compression_training", kSection, nullptr, {}, "models are trained uncompressed"},
      {"data_efficiency", kSection, nullptr, false, "every sample is used alike"},
      {"curriculum_learning", kSection, nullptr, false, "every sample is used alike"},
      {"progressive_layer_drop", kSection, nullptr, false, "every block is trained"},
  };
  return kTable;
}

std::string effect_text(const DeepSpeedKey& key) {
  const std::string because = *key.note ? fmt::format(": {}", key.note) : "";
  switch (key.effect) {
    case kOption:
    case kTogether:
      return fmt::format("`--{}`{}", key.option, because);
    case kAlways:
      return fmt::format("always {}, else warned{}", key.only.dump(), because);
    case kOnly:
      return fmt::format("only {}, else refused{}", key.only.dump(), because);
    case kNoEffect:
      return "no effect, warned unless false" + because;
    case kFree:
      return "either way" + because;
    case kSection:
      return (key.only == false ? "refused when enabled" : "no effect, warned when enabled") + because;
  }
  return "";
}

}  // namespace

std::span<const DeepSpeedKey> deepspeed_keys() { return table(); }

std::string deepspeed_keys_text() {
  std::string text = "| key | here |\n|---|---|\n";
  for (const DeepSpeedKey& key : deepspeed_keys())
    text += fmt::format("| `{}` | {} |\n", key.path, effect_text(key));
  return text;
}

}  // namespace kiln
