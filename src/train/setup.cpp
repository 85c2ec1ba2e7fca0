#include "train/setup.h"

#include <algorithm>
#include <set>

#include "checkpoint/tensor_files.h"
#include "checkpoint/weights_file.h"
#include "core/aten.h"
#include "core/error.h"
#include "core/files/mapped_file.h"
#include "core/json_config.h"
#include "core/tensors.h"
#include "core/text/some_of.h"
#include "data/loader/batches.h"
#include "diffusion/alignment.h"
#include "models/load_model.h"
#include "models/lora_keys.h"
#include "models/piece_checks.h"
#include "models/registry.h"
#include "ops/fp8.h"
#include "train/memory_choices.h"

namespace kiln {

namespace {

// Makes the weights that a run begins with, one at a time: fresh ones, or those of a file. On meta their
// values are not set.
class FirstWeights {
 public:
  // `denoiser` consists of outlines. On meta no file is read. Throws Error: the file does not fit.
  FirstWeights(const TrainOptions& options, const nlohmann::json& config, const Denoiser& denoiser,
               at::Device device)
      : seed_(options.seed), source_(options.model.weights), device_(device) {
    if (source_.empty() || !has_values(device)) return;
    std::set<std::string> of_model;  // keys
    for (const auto& parameter : denoiser.parameters()) of_model.insert(parameter->key);
    loaded_ = load_tensors(path_of_tensors(source_));
    const auto is_of_model = [&](const auto& entry) { return of_model.contains(entry.first); };
    if (const WeightsSource source = find_weights(source_);
        !source.foreign.is_null() && !std::ranges::all_of(loaded_, is_of_model)) {
      LoadedModel model = load_model(source, {.model = options.model.name, .config = config});
      loaded_ = std::move(model.weights);
      has_null_rows_ = model.has_null_rows;
    }
    load_weights(denoiser, loaded_, source_);
  }

  bool has_null_rows() const { return has_null_rows_; }

  at::Tensor operator()(const Parameter& parameter) const {
    const auto filled = std::make_shared<Parameter>(parameter);
    filled->value = at::empty(parameter.value.sizes(), at::TensorOptions(at::kFloat).device(device_));
    if (!has_values(device_)) return filled->value;
    const auto stored = loaded_.find(parameter.key);
    if (stored == loaded_.end()) {  // adapters and what can be computed begin as their Init says
      initialize_weights({filled}, seed_);
    } else {
      load_weights({filled}, {*stored}, source_);
      let_go(stored->second);
    }
    return filled->value;
  }

 private:
  // Releases what was read of a mapped file. Otherwise it would count as the process's memory until loading
  // ends, in addition to the weights made from it.
  static void let_go(const at::Tensor& stored) {
    MappedFile::release({static_cast<const std::byte*>(stored.const_data_ptr()), stored.nbytes()});
  }

  uint64_t seed_;
  std::string source_;
  at::Device device_;
  bool has_null_rows_ = true;
  std::map<std::string, at::Tensor> loaded_;
};

// Returns the layers of the adapter that the options ask for, with first values from a file if there is one.
std::vector<LoraLayer> first_lora(const LoraOptions& options, const Denoiser& denoiser) {
  if (options.weights.empty()) return fresh_lora(denoiser, options);
  return read_lora(options.weights, module_names(denoiser));
}

// Returns the images of a step that the last rank has. No rank has more.
int64_t most_rows(const TrainOptions& options, int64_t world_size) {
  return rank_rows(options.global_batch, world_size - 1, world_size).count;
}

struct RecognisedWeights {
  std::string family;
  DenoiserShape shape;
};
// Returns the model that the weights of a file are of. Nothing if it cannot be told: loading them then says
// what does not fit. `config`: the model's own, for what shapes leave open.
std::optional<RecognisedWeights> recognise_weights(const std::string& path, const nlohmann::json& config) {
  WeightShapes shapes;
  for (const auto& [key, tensor] : load_tensors(path_of_tensors(path))) shapes[key] = tensor.sizes().vec();
  // Where the data have set the config it says nothing of the weights, so it is asked last.
  for (const nlohmann::json& hints : {nlohmann::json::object(), config}) {
    try {
      const auto found = recognise_denoiser(shapes, hints);
      if (!found) return std::nullopt;
      return RecognisedWeights{
          found->family->name,
          build_denoiser(found->family->name, found->model.config, {.outline = true})->shape()};
    } catch (const Error&) {
      continue;
    }
  }
  return std::nullopt;
}

// Throws Error naming the autoencoder or the text encoder if the weights of --weights, a model of shape
// `model`, are for another one.
void require_data_of_weights(const TrainOptions& options, const DataShape& data, const DenoiserShape& model) {
  const std::string& weights = options.model.weights;
  if (model.in_channels != data.channels)
    fail("train",
         "{} gives latents of {} channels, and --weights {} take {}: give the autoencoder of the weights",
         options.data.autoencoder.empty() ? "--data " + options.data.path
                                          : "--autoencoder " + options.data.autoencoder,
         data.channels, weights, model.in_channels);
  if (data.text.width > 0 && model.conditioning.text_width != data.text.width)
    fail("train",
         "{} gives captions of width {}, and --weights {} take {}: give the text encoder of the weights",
         options.data.text_encoder.empty() ? "--data " + options.data.path
                                           : "--text-encoder " + options.data.text_encoder,
         data.text.width, weights, model.conditioning.text_width);
}

at::ScalarType grad_dtype_of(const TrainOptions& options, at::ScalarType compute_dtype, int64_t world_size) {
  const bool accumulates = rows_of_walk(options, world_size) < most_rows(options, world_size);
  return accumulates || options.compute.accumulate_f32 ? at::kFloat : compute_dtype;
}

}  // namespace

std::string path_of_tensors(const std::string& weights) {
  const WeightsSource source = find_weights(weights);
  return source.foreign.is_null() ? weights : source.path;
}

std::string digest_of_source(const std::string& weights) {
  const std::string null_rows = find_weights(weights).null_rows;
  const std::string digest = digest_of_weights(path_of_tensors(weights));
  return null_rows.empty() ? digest : digest + "+" + digest_of_weights(null_rows);
}

DataAsks asks_of(const TrainOptions& options) {
  const auto told = [options](DataShape data) {
    data.text = {};
    data.has_image_size = true;  // a model that needs it says so when it is built
    const auto objective = make_objective(objective_config_of(options.objective));
    const nlohmann::json config = denoiser_config_of(options, data, *objective);
    return build_denoiser(options.model.name, config, {.outline = true})->shape().conditioning;
  };
  return {.model = options.model.name,
          .latents = family_of(options.model.name).latents,
          .num_classes = options.model.num_classes,
          .conditioning = told,
          .draws = options.samples.every > 0 || options.evaluation.every > 0,
          .compute_dtype = options.compute.held_dtype()};
}

DataDescription describe(const TrainOptions& options) {
  return describe(source_of(options.data), asks_of(options));
}

DataShape synthetic_shape(const TrainOptions& options) {
  return describe(SyntheticData{options.data}, asks_of(options)).shape;
}

nlohmann::json denoiser_config_of(const TrainOptions& options, const DataShape& data,
                                  const Objective& objective) {
  const Lane& largest = data.largest();
  return fit_denoiser_config(options.model.name,
                             read_json_option("train", "--model-config", options.model.config),
                             {.channels = data.channels,
                              .height = largest.height,
                              .width = largest.width,
                              .side = data.side(),
                              .has_one_shape = data.lanes.size() == 1,
                              .num_classes = data.num_classes,
                              .class_dropout_prob = options.model.class_dropout_prob,
                              .text_width = data.text.width,
                              .max_text_rows = data.text.max_rows,
                              .has_image_size = data.has_image_size,
                              .learns_sigma = objective.learns_sigma(),
                              .hidden_size = options.model.hidden_size,
                              .depth = options.model.depth,
                              .num_heads = options.model.num_heads,
                              .patch_size = options.model.patch_size,
                              .position_scale = options.model.position_scale});
}

ZeroOptions zero_options_of(const TrainOptions& options, int64_t world_size) {
  if (options.global_batch < world_size)
    fail("train", "--global-batch {} is less than one image for each of {} ranks: give at least {}",
         options.global_batch, world_size, world_size);
  return options.zero;
}

int64_t rows_of_walk(const TrainOptions& options, int64_t world_size) {
  const int64_t most = most_rows(options, world_size);
  return options.micro_batch > 0 ? std::min(options.micro_batch, most) : most;
}

int64_t rows_of_last_walk(const TrainOptions& options, int64_t world_size) {
  const int64_t rows = rows_of_walk(options, world_size);
  return (most_rows(options, world_size) - 1) % rows + 1;
}

int64_t rows_of_validation(const TrainOptions& options, int64_t images, int64_t world_size) {
  const int64_t rows = rows_of_walk(options, world_size);
  return images > 0 ? std::min(rows, (images + world_size - 1) / world_size) : rows;
}

BatchOptions batch_options_of(const TrainOptions& options) {
  return {.seed = options.seed,
          .global_batch = options.global_batch,
          .draw_posterior = options.data.draw_posterior,
          .flip = options.data.flip,
          .offset_noise = options.objective.offset_noise,
          .input_perturbation = options.objective.input_perturbation,
          .has_halo = options.objective.contrastive_weight > 0,
          .num_threads = static_cast<int>(options.data.loader_threads),
          .prefetch = options.data.prefetch};
}

TrainingStateOptions state_options_of(const TrainOptions& options, at::Device device,
                                      std::shared_ptr<ProcessGroup> group) {
  const at::ScalarType compute_dtype = options.compute.held_dtype();
  const int64_t world_size = group->world_size();
  return {.device = device,
          .compute_dtype = compute_dtype,
          .grad_dtype = grad_dtype_of(options, compute_dtype, world_size),
          .master_dtype = options.compute.master_dtype,
          .seed = options.seed,
          .ema_decays = options.ema.decays,
          .loss_scaler = options.loss_scale,
          .group = std::move(group),
          .zero = zero_options_of(options, world_size),
          .offload = options.offload};
}

// Throws Error for several ranks, since their graphs would contain collectives.
std::optional<GraphOptions> graphs_of(const TrainOptions& options, at::Device device, int64_t world_size) {
  if (!options.compute.cuda_graph) return std::nullopt;
  if (world_size > 1 || options.zero.stage >= 2)
    fail("train", "--cuda-graph needs one rank and --zero-stage 0 or 1, got {} ranks and --zero-stage {}",
         world_size, options.zero.stage);
  if (options.lora.dropout > 0)
    fail("train", "--cuda-graph would drop the same elements in every step: leave out --lora-dropout");
  return GraphOptions{.make_graph = [device] { return make_device_graph(device); },
                      .warn =
                          [](const std::string& line) {
                            fmt::print(stderr, "warning: training runs without CUDA graphs: {}\n", line);
                          }};
}

std::string unnamed_size(const ModelOptions& options, const nlohmann::json& config) {
  const Family& family = family_of(options.name);
  const bool has_size = options.hidden_size > 0 || options.depth > 0 || options.num_heads > 0 ||
                        options.patch_size > 0 || !options.config.empty();
  if (options.name != family.name || has_size) return "";
  std::vector<std::string> sizes;
  for (const auto& [name, preset] : family.presets())
    if (name != family.name) sizes.push_back(name);
  if (sizes.empty()) return "";
  const std::string own = preset_name(family, config);
  return fmt::format(
      "--model {} without a size is as large as {}: name a size ({}), or give --hidden-size and --depth",
      options.name, own == family.name ? "the largest published one" : own, some_of(sizes));
}

double flops_of_image(const Training& training, const ImageExtent& image) {
  return (training.lora.empty() ? 3 : 2) * (*training.forward_flops)(image);
}

ImageExtent largest_extent(const DataShape& data) {
  const Lane& lane = data.largest();
  return {lane.height, lane.width, static_cast<double>(data.text.max_rows)};
}

double flops_of_step(const Training& training, const StepBatch& batch) {
  const TextRows& text = batch.conditioning.text;
  ImageExtent image{.height = batch.x_0.size(2), .width = batch.x_0.size(3)};
  if (text.defined())
    image.text_rows = static_cast<double>(text.host_offsets.back()) / static_cast<double>(batch.size());
  return static_cast<double>(batch.global_size()) * flops_of_image(training, image);
}

void check_first_weights(const TrainOptions& options, const DataShape& data,
                         const nlohmann::json& model_config) {
  if (options.model.weights.empty()) return;
  auto of_weights = recognise_weights(options.model.weights, model_config);
  const std::string family = family_of(options.model.name).name;
  // The keys of a class of diffusers may be another family's own.
  if (const WeightsSource source = find_weights(options.model.weights);
      of_weights && !source.foreign.is_null()) {
    const std::string class_name = source.foreign.at("_class_name");
    const bool is_read =
        std::ranges::any_of(family_of(options.model.name).formats,
                            [&](const ForeignFormat& format) { return class_name == format.class_name; });
    of_weights->family = is_read ? family : foreign_family(class_name).family->name;
  }
  if (of_weights && of_weights->family == family) require_data_of_weights(options, data, of_weights->shape);
  const auto denoiser = build_denoiser(options.model.name, model_config, {.outline = true});
  try {
    const FirstWeights weights(options, model_config, *denoiser, at::kCPU);
  } catch (const Error&) {
    if (!of_weights) {
      const std::string file = find_weights(options.model.weights).path;
      refuse_other_piece(file, load_tensors(file));
    }
    if (!of_weights || of_weights->family == family) throw;
    fail("train", "--weights {} are of {}, not of --model {}: give --model {}, with its size",
         options.model.weights, of_weights->family, options.model.name, of_weights->family);
  }
}

Training build_training(const TrainOptions& options, const DataShape& data, at::Device device,
                        std::shared_ptr<ProcessGroup> group) {
  const UntriedGpu& untried = options.compute.untried_gpu;
  if (!untried.is_none() && computing_device(device) != at::kCUDA)
    fail("train", "--untried-gpu changes what a GPU does, and this run is on a CPU: leave it out");
  const at::ScalarType compute_dtype = options.compute.held_dtype();
  Training training{.objective = make_objective(objective_config_of(options.objective)),
                    .optimizer = make_optimizer(optimizer_config_of(options.optimizer))};
  training.model_config = denoiser_config_of(options, data, *training.objective);
  training.forward_flops = std::make_unique<ForwardFlops>(options.model.name, training.model_config);
  const bool in_fp8 = options.compute.is_fp8(), is_dry = !has_values(device);
  if (in_fp8 && !is_dry) ops::require_fp8(device, options.compute.emulate_fp8);
  training.denoiser =
      build_denoiser(options.model.name, training.model_config,
                     {.compute_dtype = compute_dtype,
                      .outline = true,
                      .products = in_fp8 ? ops::Products::kFp8 : ops::Products::kComputeDtype});
  if (options.objective.align_weight > 0)
    training.objective =
        with_alignment(std::move(training.objective), options.objective.align_weight, *training.denoiser,
                       {.compute_dtype = compute_dtype, .outline = true});
  const std::vector<MemoryChoice> memory = parse_memory_choices(options.memory, *training.denoiser);
  const int64_t world_size = group->world_size();
  TrainingStateOptions state_options = state_options_of(options, device, std::move(group));
  const FirstWeights first(options, training.model_config, *training.denoiser, device);
  training.has_null_rows = first.has_null_rows();
  state_options.first_value = first;
  state_options.head = training.objective->head();
  if (options.lora.is_on()) {
    training.lora = first_lora(options.lora, *training.denoiser);
    attach_lora(*training.denoiser, training.lora, options.lora.dropout);
  }
  training.state = std::make_unique<TrainingState>(*training.denoiser, *training.optimizer, state_options);
  // The state has the weights now, so their initial values, such as tables of positions, are dropped.
  for (const auto& parameter : training.denoiser->parameters()) parameter->init.value = at::Tensor();
  training.step = std::make_unique<TrainStep>(
      *training.denoiser, *training.objective, *training.optimizer, *training.state,
      StepOptions{.device = device,
                  .micro_batch = options.micro_batch,
                  .max_grad_norm = options.optimizer.max_grad_norm,
                  .ema_schedule = options.ema.schedule,
                  .memory = memory,
                  .op_choices = {.keep_gelu = options.memory.keep_gelu || untried.has(Untried::kKeepGelu),
                                 .pack_gradients = untried.has(Untried::kPackedGradients),
                                 .time_products = untried.has(Untried::kProducts),
                                 .hand_on_branch = untried.has(Untried::kHandedOnBranch)},
                  .update_beside = options.compute.updates_beside() ? std::optional(device) : std::nullopt,
                  .graphs = is_dry ? std::nullopt  // records none
                                   : graphs_of(options, device, world_size),
                  .seed = options.seed});
  return training;
}

}  // namespace kiln
