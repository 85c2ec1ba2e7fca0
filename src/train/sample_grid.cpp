#include "train/sample_grid.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "checkpoint/train_state.h"
#include "core/aten.h"
#include "core/error.h"
#include "core/files/atomic_file.h"
#include "core/tensors.h"
#include "data/images/images.h"
#include "diffusion/sampler.h"
#include "models/text/caption_encoder.h"
#include "parallel/offload/device_wait.h"
#include "sample/sample_output.h"
#include "step/forward_pass.h"

namespace kiln {

namespace {

// The images that this rank draws (every world_size-th) and their labels: the chosen classes in turn, or
// classes spread over all. All ranks take part in every forward pass, so each draws the same number; images
// beyond the last one are dropped.
struct GridImages {
  std::vector<int64_t> images, labels;
};
GridImages images_of_rank(const TrainOptions& options, int64_t num_classes, const Ranks& ranks) {
  GridImages mine;
  for (int64_t i = ranks.rank; i < options.samples.num_samples + ranks.rank; i += ranks.world_size) {
    int64_t label = 0;
    if (!options.samples.classes.empty())
      label = options.samples.classes[static_cast<size_t>(i) % options.samples.classes.size()];
    else if (num_classes > 0 && i < options.samples.num_samples)
      label = num_classes <= options.samples.num_samples ? i % num_classes
                                                         : i * num_classes / options.samples.num_samples;
    mine.images.push_back(i);
    mine.labels.push_back(label);
  }
  return mine;
}

// Brings the images of all ranks to rank 0, in order; each rank drew every world_size-th. Other ranks get
// none.
std::vector<Image> of_all_ranks(ProcessGroup& group, const std::vector<Image>& mine) {
  std::string pixels;
  for (const Image& image : mine) pixels.append(image.rgb.begin(), image.rgb.end());
  const std::vector<std::string> all = group.gather(pixels, "the sample grid");
  if (group.rank() != 0) return {};
  const size_t image_bytes = mine[0].rgb.size();
  std::vector<Image> images;
  for (size_t i = 0, begin = 0; begin + image_bytes <= all[i].size();) {
    images.push_back({.height = mine[0].height, .width = mine[0].width, .rgb = {}});
    const auto first = all[i].begin() + static_cast<int64_t>(begin);
    images.back().rgb.assign(first, first + static_cast<int64_t>(image_bytes));
    if (++i < all.size()) continue;
    i = 0;
    begin += image_bytes;
  }
  return images;
}

// Returns how a grid is drawn and what it shows, tile by tile, as its file says it.
nlohmann::json drawn_of(const TrainOptions& options, const GridSource& source) {
  const ConditioningShape& shape = source.training.denoiser->shape().conditioning;
  const std::string& sampler = options.samples.sampler;
  nlohmann::json drawn = {
      {"seed", options.seed},
      {"sampler", !sampler.empty() ? sampler : default_sampler(source.info.objective)},
      {"num_sampling_steps", options.samples.num_sampling_steps},
      {"cfg_scale", grid_cfg_scale(options, shape)},
      {"weights", options.ema.decays.empty() ? "model" : fmt::format("ema-{}", options.ema.decays.front())}};
  if (!source.prompts.texts.empty()) drawn["prompts"] = source.prompts.texts;
  if (shape.num_classes == 0) return drawn;
  const std::vector<int64_t> labels = images_of_rank(options, shape.num_classes, {}).labels;
  for (const int64_t label : labels) {
    const std::vector<std::string>& names = source.info.class_names;
    const auto at = static_cast<size_t>(label);
    drawn["classes"].push_back(at < names.size() ? names[at] : std::to_string(label));
  }
  return drawn;
}

}  // namespace

std::string grid_sampler_name(const TrainOptions& options, const nlohmann::json& objective) {
  return options.samples.sampler.empty() ? default_sampler(objective) : options.samples.sampler;
}

nlohmann::json grid_sampler_config(const TrainOptions& options, const nlohmann::json& objective) {
  return sampler_config(grid_sampler_name(options, objective), options.samples.num_sampling_steps, objective);
}

void validate_sampling(const TrainOptions& options, const ModelRecord& info, bool has_decoder,
                       int64_t num_classes) {
  if (options.samples.every == 0 && options.evaluation.every == 0) return;
  const char* option = options.samples.every > 0 ? "--sample-every" : "--evaluate-every";
  if (info.autoencoder.name.empty())  // no autoencoder made them
    fail("train", "{} has nothing to decode synthetic latents with: leave it out", option);
  if (info.autoencoder.name != "pixels" && !has_decoder)
    fail("train", "{} needs the autoencoder of the latents to decode them{}: give --autoencoder PATH", option,
         info.autoencoder.path.empty()
             ? ""
             : fmt::format(", and {} does not exist any more", info.autoencoder.path));
  for (int64_t label : options.samples.classes)
    if (label < 0 || label >= num_classes)
      fail("train", "--sample-classes expects classes in [0, {}), got {}", num_classes, label);
  if (!options.samples.prompts.empty() && info.text.encoder.empty())
    fail("train", "--sample-prompts: {} is trained without captions: leave it out", info.model);
  grid_sampler_config(options, info.objective);
}

double grid_cfg_scale(const TrainOptions& options, const ConditioningShape& shape) {
  return shape.can_be_guided() ? options.samples.cfg_scale : 1;
}

ForwardFn forward_of(const Training& training) {
  return [&denoiser = *training.denoiser, &zero = *training.state->zero](const ModelInput& input) {
    return forward_pass(denoiser, zero, input);
  };
}

bool draw_share(const TrainOptions& options, const GridSource& source, const std::function<bool()>& stop,
                const ImageSink& sink) {
  const Training& training = source.training;
  ProcessGroup& group = training.state->zero->group();
  const ConditioningShape& shape = training.denoiser->shape().conditioning;
  SampleOptions sampling;
  sampling.sampler = grid_sampler_config(options, source.info.objective);
  sampling.height = sampling.width = drawn_side(source.info, training.denoiser->shape(), /*downsample=*/1);
  const GridImages mine = images_of_rank(options, shape.num_classes, group.ranks());
  sampling.images = mine.images;
  const auto num_prompts = static_cast<int64_t>(source.prompts.texts.size());
  std::vector<int64_t> prompts;
  for (const int64_t image : mine.images) prompts.push_back(num_prompts > 0 ? image % num_prompts : 0);
  sampling.conditioning = with_image_size(
      shape, with_prompts(class_labels_fn(shape, mine.labels), source.prompts, std::move(prompts)),
      source.info.image_size, source.info.image_size);
  sampling.null_text = source.prompts.null;
  sampling.cfg_scale = grid_cfg_scale(options, shape);
  sampling.seed = options.seed;
  sampling.device = source.device;
  sampling.stop = [&] { return group.sum({stop() ? 1.0 : 0.0}, "a stop signal").front() > 0; };
  sampling.forward = [&group, device = source.device,
                      forward = forward_of(training)](const ModelInput& input) {
    at::Tensor prediction = forward(input);
    wait_for_device(device, group, "a sample grid");  // what follows is this rank's own work
    return prediction;
  };
  bool drawn = false;
  with_first_ema(*training.state, [&] {
    drawn = sample_images(*training.denoiser, source.decoder, sampling,
                          [&](int64_t image_index, const Image& image) {
                            if (image_index < options.samples.num_samples) sink(image_index, image);
                          });
  });
  return drawn;
}

SampleGrid draw_sample_grid(const TrainOptions& options, const GridSource& source,
                            const std::function<bool()>& stop) {
  ProcessGroup& group = source.training.state->zero->group();
  std::vector<Image> images;
  const bool drawn =
      draw_share(options, source, stop, [&](int64_t, const Image& image) { images.push_back(image); });
  if (drawn) images = of_all_ranks(group, images);
  if (!drawn || images.empty()) return {};
  const int64_t columns = static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(images.size()))));
  const Image grid = make_grid(images, columns);
  return {.png = encode_png(grid, drawn_texts("", drawn_of(options, source))),
          .height = grid.height,
          .width = grid.width};
}

Prompts captions_of_samples(const TextStore& store, int64_t count, const ConditioningShape& shape) {
  const TextStoreInfo& info = store.info();
  const at::ScalarType dtype = to_scalar_type(info.dtype);
  Prompts prompts;
  std::vector<at::Tensor> rows;
  const int64_t num_prompts = std::min(count, info.num_samples);
  for (int64_t i = 0; i < num_prompts; ++i) {
    const int64_t entry = store.entry(i * info.num_samples / num_prompts, 0);
    prompts.texts.emplace_back(store.text(entry));
    rows.push_back(stored_rows(store, entry));
  }
  prompts.rows = joined_rows(rows, dtype);
  if (!shape.has_null_text) prompts.null = joined_rows({stored_rows(store, TextStore::kNullEntry)}, dtype);
  return prompts;
}

Prompts grid_prompts(const TrainOptions& options, const TrainingData& data, const ConditioningShape& shape,
                     at::Device device, at::ScalarType compute_dtype, int64_t num_processes) {
  if (!data.text) return {};
  if (!options.samples.prompts.empty() && data.captions)
    return encode_prompts(*data.captions->encoder(), text_info(*data.text), options.samples.prompts,
                          /*negative=*/"", shape);
  if (!options.samples.prompts.empty())
    return encode_prompts(text_info(*data.text), options.data.text_encoder, options.samples.prompts,
                          /*negative=*/"", shape, device, compute_dtype, num_processes);
  return captions_of_samples(*data.text, options.samples.num_samples, shape);
}

std::string write_sample_grid(const std::string& run, int64_t step, const SampleGrid& grid) {
  std::filesystem::create_directories(run + "/samples");
  std::string path = fmt::format("{}/samples/{}.png", run, checkpoint_name(step));
  write_file_atomically("samples", path, {reinterpret_cast<const char*>(grid.png.data()), grid.png.size()});
  return path;
}

}  // namespace kiln
