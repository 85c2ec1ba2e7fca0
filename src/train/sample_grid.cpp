#include "train/sample_grid.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "checkpoint/train_state.h"
#include "core/aten.h"
#include "core/atomic_file.h"
#include "core/error.h"
#include "data/images.h"
#include "diffusion/sampler.h"
#include "parallel/device_wait.h"
#include "train/average_in_place.h"
#include "train/forward_pass.h"

namespace kiln {

namespace {

// This rank's of all images, every world_size-th: the chosen classes in turn, or as many as fit spread over
// all of them. As many on every rank, since all take part in every forward pass: behind the last image some
// more that nobody keeps.
std::vector<ImageRequest> requests(const TrainOptions& options, int64_t num_classes, const Ranks& ranks) {
  std::vector<ImageRequest> images;
  for (int64_t i = ranks.rank; i < options.num_samples + ranks.rank; i += ranks.world_size) {
    int64_t label = 0;
    if (!options.sample_classes.empty())
      label = options.sample_classes[static_cast<size_t>(i) % options.sample_classes.size()];
    else if (num_classes > 0 && i < options.num_samples)
      label = num_classes <= options.num_samples ? i % num_classes : i * num_classes / options.num_samples;
    images.push_back({.index = i, .label = label});
  }
  return images;
}

// On rank 0 the pictures of all ranks, which drew every world_size-th each, in order. Elsewhere none.
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
         "--sample-every needs the autoencoder of the latents to decode them{}: give --autoencoder PATH",
         info.autoencoder.path.empty()
             ? ""
             : fmt::format(", and {} does not exist any more", info.autoencoder.path));
  for (int64_t label : options.sample_classes)
    if (label < 0 || label >= num_classes)
      fail("train", "--sample-classes expects classes in [0, {}), got {}", num_classes, label);
  grid_sampler_config(options, info.objective);
}

ForwardFn forward_of(const Training& training) {
  return [&denoiser = *training.denoiser, &zero = *training.state->zero](const DenoiserInput& input) {
    return forward_pass(denoiser, zero, input);
  };
}

SampleGrid draw_sample_grid(const TrainOptions& options, const RunInfo& info, const Training& training,
                            const Autoencoder* decoder, at::Device device,
                            const std::function<bool()>& stop) {
  ProcessGroup& group = training.state->zero->group();
  const DenoiserShape& shape = training.denoiser->shape();
  SampleOptions sampling;
  sampling.sampler = grid_sampler_config(options, info.objective);
  sampling.images = requests(options, shape.num_classes, group.ranks());
  sampling.cfg_scale = shape.has_null_class ? options.cfg_scale : 1;
  sampling.seed = options.seed;
  sampling.device = device;
  sampling.stop = [&] { return group.sum({stop() ? 1.0 : 0.0}, "a stop signal").front() > 0; };
  sampling.forward = [&group, device, forward = forward_of(training)](const DenoiserInput& input) {
    at::Tensor prediction = forward(input);
    wait_for_device(device, group, "a sample grid");  // what follows is of this rank alone
    return prediction;
  };
  std::vector<Image> images;
  bool drawn = false;
  with_first_ema(*training.state, [&] {
    drawn = sample_images(*training.denoiser, decoder, sampling,
                          [&](const ImageRequest& request, const Image& image) {
                            if (request.index < options.num_samples) images.push_back(image);
                          });
  });
  if (drawn) images = of_all_ranks(group, images);
  if (!drawn || images.empty()) return {};
  const int64_t columns = static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(images.size()))));
  const Image grid = make_grid(images, columns);
  return {.png = encode_png(grid), .height = grid.height, .width = grid.width};
}

std::string write_sample_grid(const std::string& run, int64_t step, const SampleGrid& grid) {
  std::filesystem::create_directories(run + "/samples");
  const std::string path = fmt::format("{}/samples/{}.png", run, checkpoint_name(step));
  write_file_atomically("samples", path, {reinterpret_cast<const char*>(grid.png.data()), grid.png.size()});
  return path;
}

}  // namespace kiln
