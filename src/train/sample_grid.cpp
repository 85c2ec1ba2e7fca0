#include "train/sample_grid.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/tensors.h"
#include "data/images.h"
#include "diffusion/sampler.h"
#include "models/registry.h"
#include "sample/sampler_loop.h"
#include "train/checkpoints.h"

namespace kiln {

namespace {

// The chosen classes in turn, or as many as fit spread over all of them.
std::vector<ImageRequest> requests(const TrainOptions& options, int64_t num_classes) {
  std::vector<ImageRequest> images;
  for (int64_t i = 0; i < options.num_samples; ++i) {
    int64_t label = 0;
    if (!options.sample_classes.empty())
      label = options.sample_classes[static_cast<size_t>(i) % options.sample_classes.size()];
    else if (num_classes > 0)
      label = num_classes <= options.num_samples ? i % num_classes : i * num_classes / options.num_samples;
    images.push_back({.index = i, .label = label});
  }
  return images;
}

// On rank 0 the pictures of all ranks, which drew every world_size-th each, in order. Elsewhere, and when a
// rank has not drawn its own, none.
std::vector<Image> of_all_ranks(ProcessGroup& group, bool drawn, std::vector<Image> mine) {
  std::string pixels = drawn ? "+" : "-";
  for (const Image& image : mine) pixels.append(image.rgb.begin(), image.rgb.end());
  std::vector<std::string> all = group.gather(pixels, "the sample grid");
  if (std::ranges::any_of(all, [](const std::string& text) { return text.front() != '+'; })) return {};
  if (group.rank() != 0 || mine.empty()) return {};
  const size_t image_bytes = mine[0].rgb.size();
  std::vector<Image> images;
  for (size_t i = 0, begin = 1; begin + image_bytes <= all[i].size();) {
    images.push_back({.height = mine[0].height, .width = mine[0].width, .rgb = {}});
    const auto first = all[i].begin() + static_cast<int64_t>(begin);
    images.back().rgb.assign(first, first + static_cast<int64_t>(image_bytes));
    if (++i < all.size()) continue;
    i = 0;
    begin += image_bytes;
  }
  return images;
}

}  // namespace

nlohmann::json grid_sampler_config(const TrainOptions& options, const nlohmann::json& objective) {
  const bool flow = objective.at("type") == "flow";
  const std::string name = !options.sampler.empty() ? options.sampler : flow ? "flow_euler" : "ddim";
  return sampler_config(name, options.num_sampling_steps, objective);
}

void validate_sampling(const TrainOptions& options, const RunInfo& info, bool has_decoder,
                       int64_t num_classes) {
  if (options.sample_every == 0) return;
  if (options.data == "synthetic" && info.autoencoder.name != "pixels")
    fail("train", "--sample-every has nothing to decode synthetic latents with: leave it out");
  if (info.autoencoder.name != "pixels" && !has_decoder)
    fail("train",
         "--sample-every needs the autoencoder of the latents to decode them: give --autoencoder PATH");
  for (int64_t label : options.sample_classes)
    if (label < 0 || label >= num_classes)
      fail("train", "--sample-classes expects classes in [0, {}), got {}", num_classes, label);
  grid_sampler_config(options, info.objective);
}

SampleGrid draw_sample_grid(const TrainOptions& options, const RunInfo& info, const TrainingState& state,
                            const Autoencoder* decoder, at::Device device,
                            const std::function<bool()>& stop) {
  at::NoGradGuard no_grad;
  const auto denoiser =
      build_denoiser(info.model, info.model_config,
                     {.device = device, .compute_dtype = parse_compute_dtype(options.compute_dtype)});
  const WeightsKind kind = state.ema_decays.empty() ? WeightsKind::kMaster : WeightsKind::kEma;
  copy_weights(state, kind, /*ema_index=*/0, *denoiser);

  const DenoiserShape& shape = denoiser->shape();
  SampleOptions sampling;
  sampling.sampler = grid_sampler_config(options, info.objective);
  ProcessGroup& group = state.zero->group();
  const std::vector<ImageRequest> all = requests(options, shape.num_classes);
  for (size_t i = static_cast<size_t>(group.rank()); i < all.size();
       i += static_cast<size_t>(group.world_size()))
    sampling.images.push_back(all[i]);
  sampling.cfg_scale = shape.has_null_class ? options.cfg_scale : 1;
  sampling.seed = options.seed;
  sampling.device = device;
  sampling.stop = stop;
  std::vector<Image> images;
  const bool drawn = sample_images(*denoiser, decoder, sampling,
                                   [&](const ImageRequest&, const Image& image) { images.push_back(image); });
  images = of_all_ranks(group, drawn, std::move(images));
  if (images.empty()) return {};
  const int64_t columns = static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(images.size()))));
  const Image grid = make_grid(images, columns);
  return {.png = encode_png(grid), .height = grid.height, .width = grid.width};
}

}  // namespace kiln
