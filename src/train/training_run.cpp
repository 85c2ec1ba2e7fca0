#include "train/training_run.h"

#include <ATen/Parallel.h>

#include <filesystem>
#include <utility>

#include "checkpoint/weights_file.h"
#include "core/files/atomic_file.h"
#include "core/tensors.h"
#include "core/text/printable.h"
#include "core/text/utf8.h"
#include "diffusion/scheduler_config.h"
#include "models/load_model.h"
#include "parallel/cpu_share.h"
#include "parallel/machine.h"
#include "parallel/ranks/agreement.h"
#include "run/option_values.h"
#include "run/published_settings.h"
#include "run/stage_options.h"
#include "train/encoding/pictures.h"
#include "train/sample_grid.h"
#include "train/setup.h"

namespace kiln {

namespace {

namespace fs = std::filesystem;

// Returns lines such as "--tf32 has no effect on a CPU".
std::vector<std::string> settings_without_effect(const TrainOptions& options, at::Device device,
                                                 int64_t world_size) {
  const TrainOptions defaults;
  const bool is_alone = world_size == 1;
  std::vector<std::string> lines = data_settings_without_effect(options.data, options.validation);
  const auto note_if = [&](bool ineffective, const char* option, const std::string& where) {
    if (ineffective) lines.push_back(fmt::format("--{} has no effect {}", option, where));
  };
  const int64_t rows = rows_of_walk(options, world_size);
  note_if(options.micro_batch > rows, "micro-batch",
          fmt::format("beyond the {} images that a rank has in a step", rows));
  note_if(options.compute.tf32 && device.is_cpu(), "tf32", "on a CPU");
  note_if(!options.memory.offload_activations.is_none() && device.is_cpu(), "offload-activations",
          "on a CPU beyond that of --recompute");
  note_if(options.offload.optimizer == Placement::kHost && device.is_cpu(), "offload-optimizer cpu",
          "on a CPU, whose memory it is");
  note_if(!options.offload.nvme.folder.empty() && !options.offload.uses_disk(), "nvme-path",
          "without --offload-optimizer nvme or --offload-params nvme");
  note_if(options.offload.params == Placement::kHost && device.is_cpu(), "offload-params cpu",
          "on a CPU, whose memory it is");
  note_if(options.zero.stage > 0 && is_alone && options.offload.params == Placement::kDevice, "zero-stage",
          "on a single rank");
  note_if(options.zero.shard_within_node && (options.zero.stage == 0 || is_alone), "shard-within-node",
          is_alone ? "on a single rank" : "with --zero-stage 0");
  note_if(options.zero.reduce_dtype.has_value() && is_alone, "reduce-dtype", "on a single rank");
  note_if(options.zero.reduce_bucket_size > 0 && is_alone, "reduce-bucket-size", "on a single rank");
  const std::string below = fmt::format("with --zero-stage {}", options.zero.stage);
  note_if(options.zero.persist_threshold > 0 && options.zero.stage < 3, "persist-threshold", below);
  note_if(options.zero.prefetch_segments != defaults.zero.prefetch_segments && options.zero.stage < 3,
          "prefetch-segments", below);
  return lines;
}

// Returns the record that a run has before its next stage, or while one lasts. Nothing where there is none or
// it cannot be read.
std::optional<ModelRecord> record_before(const std::string& run) {
  if (!is_run_folder(run)) return std::nullopt;
  try {
    return read_run_info(run);
  } catch (const Error&) {
    return std::nullopt;
  }
}

// Returns what the weights have seen in the stages before the one from `first_step` on, with the step at
// which each ended.
nlohmann::json earlier_stages(const std::optional<ModelRecord>& record, int64_t first_step) {
  if (!record || record->trained_on.empty()) return nlohmann::json::array();
  nlohmann::json last = record->trained_on;
  nlohmann::json stages = last.value("earlier", nlohmann::json::array());
  last.erase("earlier");
  stages.push_back(last);
  nlohmann::json earlier = nlohmann::json::array();
  for (nlohmann::json& stage : stages)
    if (stage.value("first_step", int64_t{0}) < first_step) earlier.push_back(std::move(stage));
  int64_t end = first_step;
  for (auto stage = earlier.rbegin(); stage != earlier.rend(); ++stage) {
    (*stage)["steps"] = end;
    end = stage->value("first_step", int64_t{0});
  }
  return earlier;
}

// Returns the folder's own name: a record tells no paths of this machine.
std::string folder_name(const fs::path& folder) {
  return (folder.has_filename() ? folder : folder.parent_path()).filename().string();
}

// Returns "10 classes" or "captions of 6.3 rows on average and 256 at most".
std::string told_text(const DataShape& data) {
  if (data.text.width == 0) return fmt::format("{} classes", data.num_classes);
  return fmt::format("captions of {:.1f} rows on average and {} at most", data.text.mean_rows,
                     data.text.max_rows);
}

}  // namespace

TrainingRun::TrainingRun(const TrainOptions& given, std::shared_ptr<ProcessGroup> ranks, int64_t first)
    : options(given),
      first_step(first),
      group(std::move(ranks)),
      device(choose_device(options.compute.device, group->ranks().local_rank)),
      compute_dtype(options.compute.held_dtype()),
      phase_memory(device) {
  apply(ComputeSettings{.device = device,
                        .threads = options.compute.threads,
                        .cpu_share = cpu_share(*group),
                        .tf32 = options.compute.tf32,
                        .deterministic = options.compute.deterministic});
  for (const std::string& line : settings_without_effect(options, device, group->world_size())) warn(line);
  data = open_training_data(describe(options), options, device, compute_dtype);
  for (const std::string& note : data.notes) warn(note);
  const auto warn_of = [&](const Pictures& pictures, const std::string& path) {
    if (!pictures.images || !is_first()) return;
    for (const std::string& note : picture_notes(pictures, path)) warn(note);
  };
  warn_of(data.pictures, options.data.path);
  const nlohmann::json objective = objective_config_of(options.objective);
  info = {.model = options.model.name,
          .model_config = denoiser_config_of(options, data.shape, *make_objective(objective)),
          .objective = objective,
          .image_size = options.data.image_size,
          .autoencoder = data.autoencoder_info,
          .text = data.text ? text_info(*data.text) : ModelRecord::TextInfo(),
          .class_names = data.class_names,
          .ema_decays = options.ema.decays};
  info.autoencoder.downsample = std::max<int64_t>(options.data.image_size / data.shape.side(), 1);
  validate_sampling(options, info, data.decoder != nullptr, data.shape.num_classes);
  if (options.validation.is_on()) validation.emplace(options, data, device);
  if (validation) warn_of(validation->pictures(), options.validation.data);
  config = {{"options", to_json(options)}, {"data", data.identity}};
  if (first_step == 0 && is_first()) check_first_weights(options, data.shape, info.model_config);
  if (first_step == 0) compare_with_weights();
  if (options.lora.is_on()) describe_base();
}

// Names pieces of the data that are not those of --weights, as far as these have a record.
void TrainingRun::compare_with_weights() const {
  if (!is_first() || options.model.weights.empty()) return;
  const ModelRecord record = find_weights(options.model.weights).record;
  const auto compare = [&](const char* piece, const std::string& ours, const std::string& theirs) {
    if (!ours.empty() && !theirs.empty() && ours != theirs)
      warn(fmt::format("the {} of the data ({}) is another than that of --weights {} ({})", piece, ours,
                       options.model.weights, theirs));
  };
  compare("autoencoder", info.autoencoder.fingerprint, record.autoencoder.fingerprint);
  compare("text encoder", info.text.encoder_fingerprint, record.text.encoder_fingerprint);
  compare("tokenizer", info.text.tokenizer_fingerprint, record.text.tokenizer_fingerprint);
  if (record.objective.is_object() && !have_same_schedule(record.objective, info.objective))
    warn(fmt::format("this run trains with {}, --weights {} were trained with {}",
                     objective_text(info.objective), options.model.weights,
                     objective_text(record.objective)));
}

// Describes the base of an adapter, on which a checkpoint depends.
void TrainingRun::describe_base() {
  if (options.model.weights.empty())
    fail("train", "--lora-rank trains an adapter of weights: give them with --weights");
  info.adapter.base_path = fs::absolute(options.model.weights).string();
  info.adapter.base_fingerprint = digest_of_source(options.model.weights);
  config["base"] = info.adapter.base_fingerprint;
  if (!is_first()) return;  // which alone writes the record
  if (const std::optional<ModelRecord> before = record_before(options.out);
      before && before->adapter.base_fingerprint == info.adapter.base_fingerprint &&
      before->model == info.model && before->model_config == info.model_config)
    info.adapter.base_values = before->adapter.base_values;
  if (!info.adapter.base_values.empty()) return;  // a resumed run knows them of the same bytes
  const WeightsSource base = find_weights(options.model.weights);
  info.adapter.base_values =
      fingerprint_of_values(load_model(base, {.model = info.model, .config = info.model_config}));
}

// Completes the record of the weights: how pictures are drawn with them, and what they have seen.
void TrainingRun::describe_drawing() {
  Drawing drawing = published_drawing(info.model, info.objective, options.samples.sampler);
  if (options.samples.every > 0 || options.evaluation.every > 0)
    drawing = {.sampler = grid_sampler_name(options, info.objective),
               .num_sampling_steps = options.samples.num_sampling_steps,
               .cfg_scale = options.samples.cfg_scale};
  info.drawing = drawing_info(drawing, training.denoiser->shape());
  if (!training.denoiser->shape().conditioning.takes_labels()) info.class_names.clear();
  const std::optional<ModelRecord> before =
      first_step > 0 ? record_before(options.out) : std::optional<ModelRecord>();
  if (const auto& null_rows = training.denoiser->null_text()) {
    const std::string& weights = options.model.weights;
    const bool is_filled = data.text && data.text->num_rows(TextStore::kNullEntry) > 0;
    info.null_rows = null_rows->trainable                         ? "trained"
                     : before                                     ? before->null_rows
                     : !weights.empty() && training.has_null_rows ? find_weights(weights).record.null_rows
                     : is_filled                                  ? "empty_caption"
                                                                  : "";
  }
  const int64_t downsample = info.autoencoder.downsample;
  info.buckets.clear();
  if (data.shape.lanes.size() > 1)
    for (const Lane& lane : data.shape.lanes)
      info.buckets.push_back({.height = lane.height * downsample, .width = lane.width * downsample});
  std::vector<std::string> sources = {folder_name(options.data.path)};
  for (const std::string& path : options.data.more) sources.push_back(folder_name(path));
  info.trained_on = {{"data", sources},
                     {"samples", batches->order().samples_per_epoch()},
                     {"global_batch", options.global_batch}};
  if (first_step > 0) info.trained_on["first_step"] = first_step;
  if (const nlohmann::json stages = earlier_stages(before, first_step); !stages.empty())
    info.trained_on["earlier"] = stages;
  // Class names may be folder names: bytes that are not UTF-8 become the replacement character.
  config["record"] = nlohmann::json::parse(dump_utf8(to_json(info)));
}

void TrainingRun::warn(const std::string& text) const {
  if (is_first()) fmt::print(stderr, "warning: {}\n", printable(text, "\n"));
}

void TrainingRun::check_same_on_all_ranks() const {
  const std::string validation_identity = validation ? validation->identity() : "";
  require_same_on_all_ranks(*group, {{"the content of --data", data.identity},
                                     {"the content of --validation-data", validation_identity},
                                     {"the content of --weights", weights_identity()}});
  if (validation && validation_identity == data.identity)
    warn("--validation-data holds the samples of --data: its loss says no more than that of training");
}

// Returns "" when there are no weights, or no other rank to compare them with.
std::string TrainingRun::weights_identity() const {
  std::string digest;
  if (options.lora.is_on()) return info.adapter.base_fingerprint;
  if (!options.model.weights.empty() && !is_alone())
    agree(*group, "--weights", [&] { digest = digest_of_source(options.model.weights); });
  return digest;
}

void TrainingRun::build() {
  // All ranks measure at once, since they will also compute at once. They measure before there is state,
  // which may leave no room.
  peak_flops = options.watch.peak_tflops > 0 ? options.watch.peak_tflops * 1e12
                                             : measure_peak_flops(device, compute_dtype);
  if (options.compute.untried_gpu.has(Untried::kProducts))
    products.emplace(options.out, group->rank(), device);
  if (options.evaluation.every > 0) {
    const PhaseMemory::Phase phase(phase_memory, "evaluation");
    evaluation.emplace(options, *group, device);
  }
  {
    const PhaseMemory::Phase phase(phase_memory, "load");
    training = build_training(options, data.shape, device, group);
  }
  if (!training.lora.empty()) info.adapter.config = lora_config(training.lora);
  if (data.text)
    fill_null_text(*data.text, *training.denoiser,
                   /*has_weights=*/!options.model.weights.empty() && training.has_null_rows);
  if (training.state->nvme) {
    const BlockStore& store = *training.state->nvme->store();
    for (const std::string& note : store.notes()) warn(note);
  }
  const DenoiserShape& shape = training.denoiser->shape();
  if (options.samples.every > 0)
    prompts = grid_prompts(options, data, shape.conditioning, device, compute_dtype,
                           group->ranks().local_world_size);
  BatchOptions batch = batch_options_of(options);
  batch.begin = first_step * options.global_batch;
  batch.rank = group->rank();
  batch.world_size = group->world_size();
  batch.class_dropout_prob = shape.conditioning.has_null_class ? options.model.class_dropout_prob : 0;
  batch.null_class = shape.conditioning.num_classes;
  batch.text_dropout_prob = options.data.text_dropout_prob;
  batch.has_null_text = shape.conditioning.has_null_text;
  batches = data.batches(batch);
  if (is_first()) describe_drawing();
}

void TrainingRun::write_description(const TrainOptions& recipe) const {
  if (!is_first()) return;
  write_run_info(options.out, info);
  write_file_atomically("train", options.out + "/config.toml", recipe_of(recipe));
}

std::vector<std::shared_ptr<const RunPictures>> TrainingRun::encoded_pictures() const {
  std::vector<std::shared_ptr<const RunPictures>> pictures = {data.pictures.images};
  if (validation) pictures.push_back(validation->pictures().images);
  std::erase(pictures, nullptr);
  return pictures;
}

void TrainingRun::record_pictures(bool begins_stage) const {
  const auto pictures = encoded_pictures();
  if (pictures.empty()) return;
  const auto record = [&] {
    try {
      if (is_first()) prepare_left_out(options.out + "/" + kLeftOutFile, first_step, begins_stage);
      for (const auto& of : pictures) of->record_in(options.out, first_step, begins_stage && is_first());
    } catch (const Error& error) {
      warn(fmt::format("{}: a resumed run will not compare its pictures with those of now", error.what()));
    }
  };
  if (is_first()) record();
  group->barrier("the record of pictures");
  if (!is_first()) record();
}

void TrainingRun::say_left_out() const {
  for (const auto& pictures : encoded_pictures())
    for (const SkippedPicture& picture : pictures->take_new_left_out())
      fmt::print(stderr, "skipped: {}\n", printable(picture.why));
}

// What threads have found ahead of the last step is in the list, so it is said too.
TrainingRun::~TrainingRun() {
  try {
    batches.reset();
    say_left_out();
  } catch (const std::exception&) {  // nobody can be told
  }
}

void TrainingRun::print_description() const {
  if (!is_first()) return;
  int64_t num_weights = 0;
  for (size_t s = 0; s < training.denoiser->segments().size(); ++s)
    for (const FlatSlot& slot : training.state->segments[s].unit.layout().slots) num_weights += slot.numel;
  std::string weights = fmt::format("{:.1f} M weights", static_cast<double>(num_weights) / 1e6);
  if (!training.lora.empty())
    weights = fmt::format("an adapter of {} layers, {:.2f} M weights", training.lora.size(),
                          static_cast<double>(num_weights) / 1e6);
  fmt::print("{}: {}, {} x {} latents, {}, {}, {} on {} with {} threads\n", info.model, weights,
             data.shape.channels, lanes_text(data.shape.lanes), told_text(data.shape), options.objective.name,
             choice_name(options.compute.dtype), machine_name(device), at::get_num_threads());
  if (data.pictures.lanes) fmt::print("{}", data.pictures.lanes->table_text());
  if (const std::string line = unnamed_size(options.model, info.model_config); !line.empty()) warn(line);
  if (!is_alone())
    fmt::print("{} ranks, {} on this machine, ZeRO stage {}\n", group->world_size(),
               group->ranks().local_world_size, options.zero.stage);
  const int64_t num_samples = batches->order().samples_per_epoch();
  if (num_samples == 0) return;  // endless
  const double epoch_steps = static_cast<double>(num_samples) / static_cast<double>(options.global_batch);
  if (num_samples < options.global_batch)
    warn(fmt::format("--global-batch {} is more than the {} samples: a single step is {:.1f} epochs",
                     options.global_batch, num_samples, 1 / epoch_steps));
  if (options.max_minutes > 0)  // the number of steps is not known
    fmt::print("{} samples: {:.1f} steps an epoch, at most {:g} minutes\n", num_samples, epoch_steps,
               options.max_minutes);
  else
    fmt::print("{} samples: {:.1f} steps an epoch, {:.1f} epochs in {} steps\n", num_samples, epoch_steps,
               static_cast<double>(options.max_steps - first_step) / epoch_steps,
               options.max_steps - first_step);
}

}  // namespace kiln
