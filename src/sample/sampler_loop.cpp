#include "sample/sampler_loop.h"

#include <ATen/core/grad_mode.h>

#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "checkpoint/tensor_files.h"
#include "core/aten.h"
#include "core/error.h"
#include "diffusion/sampler_noise.h"
#include "parallel/offload/host_copy.h"

namespace kiln {

namespace {

// Thrown to leave the sampler's loop when SampleOptions::stop says so.
struct Stopped {};

// Returns (B, C, H, W) f32 on `device`, as `fill` fills it on the host. While a GPU computes a step, the host
// draws for the next one.
template <class Fill>
at::Tensor drawn_on(at::Device device, size_t num_images, at::IntArrayRef image_shape, const Fill& fill) {
  std::vector<int64_t> shape = {static_cast<int64_t>(num_images)};
  shape.insert(shape.end(), image_shape.begin(), image_shape.end());
  const at::Tensor noise = host_empty(shape, at::kFloat, device);
  fill(noise);
  return sent_to(noise, device);
}

// Returns a function that calls `inside` at timesteps of the interval and `outside` at the others.
DenoiseFn within(const SampleOptions::GuidanceInterval& interval, DenoiseFn inside, DenoiseFn outside) {
  return [interval, inside = std::move(inside), outside = std::move(outside)](const at::Tensor& x,
                                                                              double model_t) {
    return (interval.low <= model_t && model_t <= interval.high ? inside : outside)(x, model_t);
  };
}

// Returns what the images start from.
at::Tensor start_of(const SampleOptions& options, const std::vector<int64_t>& images,
                    at::IntArrayRef image_shape) {
  if (!options.noise.defined()) return start_noise(options.seed, images, image_shape, options.device);
  return options.noise.index_select(0, at::tensor(images, at::kLong)).to(options.device);
}

at::Tensor noise_of_step(const SampleOptions& options, const std::vector<int64_t>& images,
                         at::IntArrayRef image_shape, int64_t step) {
  if (!options.step_noise.defined())
    return step_noise(options.seed, images, image_shape, step, options.device);
  if (step >= options.step_noise.size(0))
    fail("sample", "--noise has noise for {} steps, the sampler takes more", options.step_noise.size(0));
  return options.step_noise[step].index_select(0, at::tensor(images, at::kLong)).to(options.device);
}

// Latents -> (B, 3, H, W) in about [-1, 1].
at::Tensor decode(const Autoencoder* autoencoder, const at::Tensor& latents) {
  if (!autoencoder) return latents;
  return autoencoder->decode(latents / autoencoder->scaling_factor + autoencoder->shift_factor);
}

Conditioning unconditional_of(const ConditioningShape& shape, const Conditioning& cond,
                              const SampleOptions& options) {
  if (!options.null_text.defined()) return unconditional(shape, cond);
  const std::vector<int64_t> same(static_cast<size_t>(cond.text.num_samples()), 0);
  return to_device(unconditional(shape, cond, select_texts(options.null_text, same)), options.device);
}

// Throws Error unless the last dimensions of the noise are (N, C, H, W) with enough pictures.
void check_noise(const char* name, const at::Tensor& noise, int64_t dim, const std::string& path,
                 int64_t num_images, at::IntArrayRef image_shape) {
  const at::IntArrayRef sizes = noise.sizes();
  if (noise.dim() != dim || sizes.slice(static_cast<size_t>(dim - 3)) != image_shape ||
      sizes[static_cast<size_t>(dim - 4)] < num_images)
    fail("sample", "--noise {}: expected \"{}\" of {}{} pictures or more of {}, got {}", path, name,
         dim == 5 ? "steps x " : "", num_images, fmt::join(image_shape, " x "), fmt::join(sizes, " x "));
}

struct PassInput {
  ModelInput of_model;
};

std::vector<at::Tensor*> graph_tensors(PassInput& pass) {
  ModelInput& input = pass.of_model;
  std::vector<at::Tensor*> tensors;
  for (at::Tensor* tensor : {&input.x_t, &input.timesteps, &input.tokens.ids, &input.tokens.counts})
    if (tensor->defined()) tensors.push_back(tensor);
  input.conditioning.visit([&](at::Tensor& tensor) { tensors.push_back(&tensor); });
  return tensors;
}

std::vector<int64_t> graph_key(const PassInput& pass) {
  std::vector<int64_t> key = host_numbers(pass.of_model.conditioning);
  const TokenRows& tokens = pass.of_model.tokens;
  for (const at::Tensor& part : {tokens.ids, tokens.counts}) key.push_back(part.defined());
  key.insert(key.end(), tokens.host_offsets.begin(), tokens.host_offsets.end());
  return key;
}

}  // namespace

ConditioningFn class_labels_fn(const ConditioningShape& shape, const std::vector<int64_t>& labels) {
  if (!shape.takes_labels()) return [](int64_t, int64_t) { return Conditioning(); };
  const int64_t last = shape.has_null_class ? shape.num_classes : shape.num_classes - 1;
  for (const int64_t label : labels)
    if (label < 0 || label > last)
      fail("sample", "expected a class in 0..{}, got {}", shape.num_classes - 1, label);
  const at::Tensor all = at::tensor(labels, at::kLong);
  return [all](int64_t first, int64_t count) {
    return Conditioning{.class_labels = all.narrow(0, first, count)};
  };
}

void freeze_weights(const Denoiser& denoiser, at::ScalarType compute_dtype) {
  for (const auto& parameter : denoiser.parameters())
    if (parameter->trainable) parameter->value = parameter->value.to(compute_dtype);
}

DenoiseFn guided_denoiser(const Denoiser& denoiser, const Conditioning& cond, const Conditioning& uncond,
                          double cfg_scale, CfgConvention convention, ForwardFn forward) {
  const DenoiserShape& shape = denoiser.shape();
  if (!forward) forward = [&denoiser](const ModelInput& input) { return denoiser.forward(input); };
  if (cfg_scale == 1)
    return [forward = std::move(forward), cond](const at::Tensor& x, double model_t) {
      return forward(
                 {.x_t = x, .timesteps = at::full({x.size(0)}, model_t, x.options()), .conditioning = cond})
          .to(at::kFloat);
    };
  const bool by_model =
      convention == CfgConvention::kModel || (convention == CfgConvention::kAuto && shape.predicts_sigma());
  const int64_t guided = by_model ? shape.guided_channels : shape.in_channels;
  return [forward = std::move(forward), both = joined(cond, uncond), cfg_scale, guided](const at::Tensor& x,
                                                                                        double model_t) {
    const int64_t batch = x.size(0);
    const at::Tensor output = forward({.x_t = at::cat({x, x}),
                                       .timesteps = at::full({2 * batch}, model_t, x.options()),
                                       .conditioning = both})
                                  .to(at::kFloat);
    at::Tensor result = output.narrow(0, 0, batch);  // the cond half; its first channels are moved in place
    const at::Tensor uncond_half = output.narrow(0, batch, batch).narrow(1, 0, guided);
    at::Tensor cond_half = result.narrow(1, 0, guided);
    cond_half.copy_(uncond_half + cfg_scale * (cond_half - uncond_half));
    return result;
  };
}

at::Tensor start_noise(uint64_t seed, const std::vector<int64_t>& images, at::IntArrayRef image_shape,
                       at::Device device) {
  return drawn_on(device, images.size(), image_shape,
                  [&](const at::Tensor& noise) { fill_start_noise(seed, images, noise); });
}

at::Tensor step_noise(uint64_t seed, const std::vector<int64_t>& images, at::IntArrayRef image_shape,
                      int64_t step, at::Device device) {
  return drawn_on(device, images.size(), image_shape,
                  [&](const at::Tensor& noise) { fill_step_noise(seed, images, step, noise); });
}

std::vector<Image> to_images(const at::Tensor& pixels) {
  if (pixels.dim() != 4 || pixels.size(1) != 3)
    fail("sample", "expected pictures of 3 channels, got {}", pixels.dim() == 4 ? pixels.size(1) : -1);
  const at::Tensor bytes = (pixels.to(at::kFloat) * 127.5 + 128)
                               .clamp(0, 255)
                               .permute({0, 2, 3, 1})
                               .to(at::kCPU, at::kByte)
                               .contiguous();
  std::vector<Image> images(static_cast<size_t>(bytes.size(0)));
  const size_t size = images.empty() ? 0 : static_cast<size_t>(bytes.numel()) / images.size();
  for (size_t i = 0; i < images.size(); ++i) {
    images[i].height = bytes.size(1);
    images[i].width = bytes.size(2);
    const uint8_t* first = bytes.const_data_ptr<uint8_t>() + i * size;
    images[i].rgb.assign(first, first + size);
  }
  return images;
}

bool sample_images(const Denoiser& denoiser, const Autoencoder* autoencoder, const SampleOptions& options,
                   const ImageSink& sink) {
  const DenoiserShape& shape = denoiser.shape();
  if (options.batch < 1) fail("sample", "expected a batch of at least 1 image, got {}", options.batch);
  const bool pixels = !autoencoder || autoencoder->name == "pixels";
  const int64_t channels = pixels ? 3 : autoencoder->latent_channels;
  if (shape.in_channels != channels)
    fail("sample",
         "the model makes {} channels, and {} has {}: give the autoencoder that the model was trained with",
         shape.in_channels, pixels ? "a picture" : "a latent of this autoencoder", channels);
  const at::NoGradGuard no_grad;
  const auto sampler = make_sampler(options.sampler);
  const int64_t height = options.height ? options.height : shape.input_size;
  const int64_t width = options.width ? options.width : shape.input_size;
  const std::vector<int64_t> image_shape = {shape.in_channels, height, width};
  const size_t total = options.images.size(), batch = static_cast<size_t>(options.batch);
  for (size_t first = 0; first < total; first += batch) {
    const std::vector<int64_t> images(options.images.begin() + first,
                                      options.images.begin() + std::min(first + batch, total));
    const Conditioning cond =
        to_device(options.conditioning(static_cast<int64_t>(first), static_cast<int64_t>(images.size())),
                  options.device);
    const bool guides = options.cfg_scale != 1;
    DenoiseFn denoise = guided_denoiser(
        denoiser, cond, guides ? unconditional_of(shape.conditioning, cond, options) : Conditioning(),
        options.cfg_scale, options.cfg_convention, options.forward);
    if (guides && options.guidance_interval)
      denoise =
          within(*options.guidance_interval, std::move(denoise),
                 guided_denoiser(denoiser, cond, Conditioning(), 1, options.cfg_convention, options.forward));
    at::Tensor x_0;
    try {
      const at::Tensor noise = start_of(options, images, image_shape);
      x_0 = run_sampler_from(
          *sampler,
          options.start_from ? sampler->noised(options.start_from(images), noise)
                             : noise * sampler->start_scale(),
          [&](const at::Tensor& x, double model_t) {
            if (options.stop && options.stop()) throw Stopped();
            return denoise(x, model_t);
          },
          [&](int64_t step) { return noise_of_step(options, images, image_shape, step); });
    } catch (const Stopped&) {
      return false;
    }
    const std::vector<Image> pictures = to_images(decode(autoencoder, x_0));
    for (size_t i = 0; i < images.size(); ++i) sink(images[i], pictures[i]);
  }
  return true;
}

GivenNoise read_noise(const std::string& path, int64_t num_images, at::IntArrayRef image_shape) {
  const auto tensors = load_tensors(path);
  const auto start = tensors.find(kNoiseTensor), steps = tensors.find(kStepNoiseTensor);
  if (start == tensors.end()) fail("sample", "--noise {} holds no tensor \"{}\"", path, kNoiseTensor);
  GivenNoise given{.start = start->second.to(at::kFloat)};
  check_noise(kNoiseTensor, given.start, 4, path, num_images, image_shape);
  if (steps == tensors.end()) return given;
  given.steps = steps->second.to(at::kFloat);
  check_noise(kStepNoiseTensor, given.steps, 5, path, num_images, image_shape);
  return given;
}

void write_noise(const std::string& path, int64_t num_images, at::IntArrayRef image_shape,
                 const SampleOptions& options) {
  std::vector<int64_t> images(static_cast<size_t>(num_images));
  std::iota(images.begin(), images.end(), 0);
  std::map<std::string, at::Tensor> tensors = {
      {kNoiseTensor, start_noise(options.seed, images, image_shape)}};
  if (const auto sampler = make_sampler(options.sampler); sampler->stochastic()) {
    std::vector<at::Tensor> steps;
    for (int64_t step = 0; step < std::ssize(sampler->timesteps()); ++step)
      steps.push_back(step_noise(options.seed, images, image_shape, step));
    tensors[kStepNoiseTensor] = at::stack(steps);
  }
  save_tensors(path, tensors);
}

ForwardFn graphed_forward(const ForwardFn& forward, GraphOptions options) {
  const auto passes = std::make_shared<GraphCache<PassInput>>(
      [forward](const PassInput& pass) { return std::vector{forward(pass.of_model)}; }, std::move(options));
  return [passes, forward](const ModelInput& input) {
    const auto outputs = passes->run({input});
    return outputs ? outputs->front() : forward(input);
  };
}

}  // namespace kiln
