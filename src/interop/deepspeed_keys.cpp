#include "interop/deepspeed_keys.h"

#include <fmt/format.h>

#include <cmath>
#include <utility>
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

using Convert = json (*)(const json&);

// Rows of the table.
DeepSpeedKey sets(const char* path, const char* option, const char* note = "", Convert convert = nullptr) {
  return {path, kOption, option, {}, note, convert};
}
DeepSpeedKey together(const char* path, const char* option, const char* note) {
  return {path, kTogether, option, {}, note};
}
DeepSpeedKey always(const char* path, json value, const char* note) {
  return {path, kAlways, nullptr, std::move(value), note};
}
DeepSpeedKey only(const char* path, json value, const char* note) {
  return {path, kOnly, nullptr, std::move(value), note};
}
DeepSpeedKey no_effect(const char* path, const char* note) { return {path, kNoEffect, nullptr, {}, note}; }
DeepSpeedKey section(const char* path, json enabled, const char* note) {
  return {path, kSection, nullptr, std::move(enabled), note};
}

const std::vector<DeepSpeedKey>& table() {
  static const std::vector<DeepSpeedKey> kTable = {
      together("train_batch_size", "global-batch",
               "= micro-batch x accumulation x ranks: two give the third; a contradiction is refused"),
      together("train_micro_batch_size_per_gpu", "micro-batch", "see `train_batch_size`"),
      together("gradient_accumulation_steps", "micro-batch", "see `train_batch_size`"),

      together("optimizer.type", "optimizer",
               "`AdamW`, or `Adam` as in DeepSpeed, where it is AdamW unless `adam_w_mode` says otherwise; "
               "others refused"),
      sets("optimizer.params.lr", "lr"),
      together("optimizer.params.betas", "beta1", "sets `--beta1` and `--beta2`"),
      sets("optimizer.params.eps", "adam-eps"),
      sets("optimizer.params.weight_decay", "weight-decay"),
      only("optimizer.params.adam_w_mode", true, "weight decay is decoupled"),
      only("optimizer.params.bias_correction", true, "AdamW corrects the bias"),
      only("optimizer.params.amsgrad", false, "AdamW has no AMSGrad"),
      no_effect("optimizer.params.torch_adam", "one fused AdamW serves every device"),
      only("optimizer.params.fp32_optimizer_states", true, "moments are f32"),
      no_effect("optimizer.legacy_fusion", "one fused AdamW serves every device"),
      no_effect("zero_allow_untested_optimizer", "every optimizer of Kiln is tested at every stage"),
      no_effect("zero_force_ds_cpu_optimizer", "the optimizer on the host is Kiln's own"),

      together("scheduler.type", "lr-schedule",
               "`WarmupLR` constant, `WarmupDecayLR` linear, `WarmupCosineLR` cosine, the decay along the "
               "whole run, the warm-up included; `OneCycle` and `LRRangeTest` refused"),
      sets("scheduler.params.warmup_max_lr", "lr"),
      always("scheduler.params.warmup_min_lr", 0, "the warm-up begins near 0"),
      always("scheduler.params.warmup_min_ratio", 0, "the warm-up begins near 0"),
      sets("scheduler.params.warmup_num_steps", "lr-warmup-steps", "", as_integer),
      sets("scheduler.params.warmup_type", "lr-warmup", "absent: log, as in DeepSpeed"),
      sets("scheduler.params.total_num_steps", "max-steps", "the schedule ends where the run ends",
           as_integer),
      sets("scheduler.params.cos_min_ratio", "min-lr-ratio"),
      no_effect("scheduler.params.last_batch_iteration", "a run resumes from its checkpoints"),

      sets("fp16.enabled", "compute-dtype", "true: fp16; false leaves the option alone, and the section",
           fp16_if),
      no_effect("fp16.auto_cast", "inputs are cast to the compute dtype where it is used"),
      sets("fp16.loss_scale", "loss-scale"),
      sets("fp16.initial_scale_power", "loss-scale-initial", "2 to this power", power_of_two),
      sets("fp16.loss_scale_window", "loss-scale-window", "", as_integer),
      sets("fp16.hysteresis", "loss-scale-hysteresis", "", as_integer),
      sets("fp16.consecutive_hysteresis", "loss-scale-consecutive"),
      sets("fp16.min_loss_scale", "loss-scale-min"),
      only("fp16.fp16_master_weights_and_grads", false, "beside fp16 master weights are f32"),
      sets("bf16.enabled", "compute-dtype", "true: bf16; false leaves the option alone, and the section",
           bf16_if),
      always("bf16.check_grad_overflow", true, "a step that is not finite is skipped"),
      no_effect("bf16.immediate_grad_update",
                "gradients of a segment are written into its flat buffer at once"),
      sets("bf16.bf16_master_weights_and_grads", "master-dtype",
           "true: bf16, rounded stochastically; gradients are bf16 already where nothing is accumulated; "
           "false leaves the option alone",
           bf16_if),
      only("bf16.bf16_optimizer_states", false, "moments are f32"),
      section("amp", false, "Apex is not used: enable bf16 or fp16"),
      section("torch_autocast", false, "there is no autocast: enable bf16 or fp16"),
      sets("data_types.grad_accum_dtype", "accumulate-f32",
           "fp32: true; else without effect: micro-steps are accumulated in f32", f32_accumulation),
      sets("communication_data_type", "reduce-dtype", "fp32, fp16, bf16", dtype_name),
      no_effect("seq_parallel_communication_data_type", "there is no sequence parallelism"),

      sets("gradient_clipping", "max-grad-norm"),
      always("prescale_gradients", false, "the loss is divided by the global batch before the backward pass"),
      always("gradient_predivide_factor", 1,
             "the loss is divided by the global batch before the backward pass"),
      always("sparse_gradients", false, "gradients are dense"),
      always("disable_allgather", false, "weights are gathered as the stage needs"),
      no_effect("dataloader_drop_last", "the stream of samples has no end: every batch is whole"),

      sets("zero_optimization.stage", "zero-stage"),
      always("zero_optimization.contiguous_gradients", true, "gradients of a segment lie in one flat buffer"),
      always("zero_optimization.reduce_scatter", true, "stages 2 and 3 reduce-scatter, 0 and 1 all-reduce"),
      sets("zero_optimization.reduce_bucket_size", "reduce-bucket-size", "", as_integer),
      no_effect("zero_optimization.use_multi_rank_bucket_allreduce", "each segment is reduced by itself"),
      always("zero_optimization.allgather_partitions", true, "weights are all-gathered"),
      no_effect("zero_optimization.allgather_bucket_size", "each segment is gathered by itself"),
      always("zero_optimization.overlap_comm", true,
             "the reduction of a segment overlaps the backward pass of the next"),
      no_effect("zero_optimization.round_robin_gradients",
                "every rank keeps a slice of every segment: all work alike"),
      no_effect("zero_optimization.sub_group_size", "the optimizer steps segment by segment"),
      sets("zero_optimization.stage3_prefetch_bucket_size", "prefetch-segments",
           "0: none; else `--prefetch-segments`, which counts segments", no_prefetch),
      sets("zero_optimization.stage3_param_persistence_threshold", "persist-threshold",
           "compared with the weights of a segment, not of a tensor", as_integer),
      no_effect("zero_optimization.stage3_model_persistence_threshold",
                "`--persist-threshold` alone decides"),
      no_effect("zero_optimization.stage3_max_live_parameters",
                "1 + `--prefetch-segments` segments are whole at once, no more"),
      no_effect(
          "zero_optimization.stage3_max_reuse_distance",
          "a segment is released after its forward pass; `stage3_max_reuse_parameters` is read as this key"),
      no_effect("zero_optimization.stage3_gather_16bit_weights_on_model_save",
                "`kiln convert` makes one file of any checkpoint"),
      no_effect("zero_optimization.stage3_module_granularity_threshold", "segments are gathered whole"),
      no_effect("zero_optimization.stage3_use_all_reduce_for_fetch_params", "segments are all-gathered"),
      no_effect("zero_optimization.stage3_allgather_sequential",
                "segments are gathered in the order of the walk"),
      no_effect("zero_optimization.memory_efficient_linear", "gradients of linear layers are Kiln's own"),
      always("zero_optimization.load_from_fp32_weights", true, "a resume starts from the masters"),
      no_effect("zero_optimization.elastic_checkpoint", "a checkpoint resumes on any number of ranks"),
      no_effect("zero_optimization.ignore_unused_parameters", "every weight of a segment has its place"),
      no_effect("zero_optimization.legacy_stage1", "there is one stage 1"),
      only("zero_optimization.zero_hpz_partition_size", 1, "see `--shard-within-node`"),
      only("zero_optimization.zero_quantized_weights", false, "weights are sent in the compute dtype"),
      only("zero_optimization.zero_quantized_nontrainable_weights", false,
           "weights are sent in the compute dtype"),
      only("zero_optimization.zero_quantized_gradients", false, "gradients are sent in `--reduce-dtype`"),

      sets("zero_optimization.offload_optimizer.device", "offload-optimizer"),
      together("zero_optimization.offload_optimizer.nvme_path", "nvme-path", "where its device is nvme"),
      always("zero_optimization.offload_optimizer.pin_memory", true, "host memory is pinned where a GPU is"),
      no_effect("zero_optimization.offload_optimizer.buffer_count",
                "segments are read, stepped and written in a pipeline"),
      always("zero_optimization.offload_optimizer.pipeline_read", true,
             "segments are read, stepped and written in a pipeline"),
      always("zero_optimization.offload_optimizer.pipeline_write", true,
             "segments are read, stepped and written in a pipeline"),
      no_effect("zero_optimization.offload_optimizer.fast_init", "the state starts in its place"),
      always("zero_optimization.offload_optimizer.ratio", 1, "all of the state is offloaded"),
      only("zero_optimization.offload_optimizer.super_offload", false, "the step is never speculative"),
      no_effect("zero_optimization.offload_optimizer.cpuadam_cores_perc",
                "`--threads` says how many cores compute"),
      sets("zero_optimization.offload_param.device", "offload-params"),
      together("zero_optimization.offload_param.nvme_path", "nvme-path", "where its device is nvme"),
      always("zero_optimization.offload_param.pin_memory", true, "host memory is pinned where a GPU is"),
      no_effect("zero_optimization.offload_param.buffer_count", "segments come and go one by one"),
      no_effect("zero_optimization.offload_param.buffer_size", "segments come and go one by one"),
      no_effect("zero_optimization.offload_param.max_in_cpu",
                "in memory are the segments that are gathered, and one that is read meanwhile"),
      sets("zero_optimization.cpu_offload", "offload-optimizer", "deprecated; true: cpu", cpu_if),
      sets("zero_optimization.cpu_offload_param", "offload-params", "deprecated; true: cpu", cpu_if),
      always("zero_optimization.cpu_offload_use_pin_memory", true, "host memory is pinned where a GPU is"),
      sets("aio.block_size", "nvme-block-size", "", as_integer),
      sets("aio.queue_depth", "nvme-queue-depth", "", as_integer),
      no_effect("aio.intra_op_parallelism", "io_uring needs one thread"),
      no_effect("aio.thread_count", "io_uring needs one thread"),
      no_effect("aio.single_submit", "blocks are submitted as the queue has room"),
      always("aio.overlap_events", true, "requests complete in any order"),
      only("aio.use_gds", false, "blocks pass through host memory"),

      no_effect("activation_checkpointing.partition_activations", "no two ranks hold the same activations"),
      sets("activation_checkpointing.cpu_checkpointing", "offload-activations",
           "true: all segments, which are recomputed", all_if),
      no_effect("activation_checkpointing.contiguous_memory_optimization",
                "inputs of segments are single tensors"),
      no_effect("activation_checkpointing.number_checkpoints", "`--recompute` names segments"),
      no_effect("activation_checkpointing.synchronize_checkpoint_boundary", "copies are ordered by events"),
      no_effect("activation_checkpointing.profile", "the log has the time of every phase"),

      sets("steps_per_print", "log-every", "", as_integer),
      DeepSpeedKey{"wall_clock_breakdown",
                   kFree,
                   nullptr,
                   {},
                   "the log has the time of every phase; measuring it costs nothing"},
      no_effect("memory_breakdown", "the log and the report have the memory by kind"),
      no_effect("dump_state", "the run folder's config.toml has every option"),
      sets("tensorboard.enabled", "tensorboard"),
      no_effect("tensorboard.output_path", "events are written into the run folder"),
      no_effect("tensorboard.job_name", "events are written into the run folder"),
      section("wandb", {}, "the run folder has log.jsonl and TensorBoard events"),
      section("comet", {}, "the run folder has log.jsonl and TensorBoard events"),
      section("csv_monitor", {}, "the run folder has log.jsonl and TensorBoard events"),
      section("comms_logger", {}, "the log has the time of communication"),
      section("flops_profiler", {}, "the log has TFLOP/s; `--profile` writes a trace"),
      no_effect("checkpoint.tag_validation", "ranks agree on a checkpoint before it counts"),
      no_effect("checkpoint.load_universal", "a checkpoint resumes on any stage and number of ranks"),
      no_effect("checkpoint.use_node_local_storage", "all ranks write into one run folder"),
      section("checkpoint.parallel_write", {}, "every rank writes its part"),
      section("elasticity", false, "batch sizes stay as given; a run resumes on any number of ranks"),
      section("autotuning", false, "use `kiln plan`"),
      section("compression_training", {}, "models are trained uncompressed"),
      section("data_efficiency", false, "every sample is used alike"),
      section("curriculum_learning", false, "every sample is used alike"),
      section("progressive_layer_drop", false, "every block is trained"),
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
