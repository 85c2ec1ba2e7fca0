// From noise to pictures: runs batches of images through a denoiser and a sampler. The sample command and the
// trainer's sample grids share it.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/json.h"
#include "data/images/images.h"
#include "diffusion/sampler.h"
#include "models/autoencoders/autoencoder.h"
#include "models/model.h"
#include "parallel/graph_cache.h"

namespace kiln {

// Which channels classifier-free guidance changes. kModel: the model's own convention (DiT: the first 3 of
// 4). kAll: every channel. kAuto: kModel if the model also predicts a sigma, as the published DiTs do, else
// kAll.
enum class CfgConvention { kAuto, kModel, kAll };

// Returns the conditioning of images [first, first + count) of a list, as tensors on the CPU.
using ConditioningFn = std::function<Conditioning(int64_t first, int64_t count)>;
// Conditions each image on its class. Throws Error for a label that the model does not have.
ConditioningFn class_labels_fn(const ConditioningShape& shape, const std::vector<int64_t>& labels);

// Runs a denoiser whose weights are not all there at once. Returns (B, out_channels, H, W).
using ForwardFn = std::function<at::Tensor(const ModelInput&)>;

struct SampleOptions {
  nlohmann::json sampler;       // make_sampler's config
  std::vector<int64_t> images;  // what to draw, in this order; an image's number decides its noise, and gives
                                // the same picture in any batch
  ConditioningFn conditioning;  // of those images
  TextRows null_text{};  // one text that guidance moves away from; undefined: the model's own null input
  double cfg_scale = 1;  // 1: no guidance, and no second half is computed
  // Timesteps at which guidance is on, as the model gets them (Kynkaanniemi et al. 2024). Absent: all.
  struct GuidanceInterval {
    double low = 0, high = 0;  // both included
  };
  std::optional<GuidanceInterval> guidance_interval{};
  CfgConvention cfg_convention = CfgConvention::kAuto;
  // Returns latents (B, C, height, width) f32 on `device`, as the model knows them, of the picture that each
  // of these images starts from. The loop noises them as the sampler's first step expects. Absent: images
  // start from noise alone.
  std::function<at::Tensor(const std::vector<int64_t>& images)> start_from{};
  int64_t height = 0, width = 0;  // of the latents; 0: the size that the model was built for
  int64_t batch = 8;              // images at a time (guidance doubles the rows)
  uint64_t seed = 0;
  // Noise by image instead of that drawn by the seed: (N, C, height, width) f32 to start from, and (steps, N,
  // C, height, width) f32 of the sampler's steps. Undefined: drawn.
  at::Tensor noise{}, step_noise{};
  at::Device device = at::kCPU;  // where the denoiser's weights are
  std::function<bool()> stop;    // optional; asked before each step; true ends the run early
  ForwardFn forward;             // optional; replaces Denoiser::forward
};

using ImageSink = std::function<void(int64_t image, const Image&)>;

// Draws options.images in inference mode and hands each finished picture to `sink`, in order. Returns false
// if `stop` ended it early. `autoencoder` decodes x_0; null: x_0 holds RGB pixels in [-1, 1]. Throws Error:
// no null class for guidance, labels out of range, neither an autoencoder nor 3 channels.
bool sample_images(const Denoiser& denoiser, const Autoencoder* autoencoder, const SampleOptions& options,
                   const ImageSink& sink);

// Casts the trained weights to the compute dtype once, since a sampler reads them at every step. For models
// that are no longer trained.
void freeze_weights(const Denoiser& denoiser, at::ScalarType compute_dtype);

// Returns the guided prediction as a DenoiseFn: uncond + cfg_scale (cond - uncond) on the guided channels.
// Both halves of the batch share x_t. The uncond half's other channels (sigma, unguided ones) are dropped.
// With cfg_scale 1 there is no guidance and `uncond` is not used.
DenoiseFn guided_denoiser(const Denoiser& denoiser, const Conditioning& cond, const Conditioning& uncond,
                          double cfg_scale, CfgConvention convention, ForwardFn forward = {});

// Draw N(0, 1) by (seed, image index), (B, C, H, W) f32: the start, and the noise of a sampler's step. The
// same bits on every device.
at::Tensor start_noise(uint64_t seed, const std::vector<int64_t>& images, at::IntArrayRef image_shape,
                       at::Device device = at::kCPU);
at::Tensor step_noise(uint64_t seed, const std::vector<int64_t>& images, at::IntArrayRef image_shape,
                      int64_t step, at::Device device = at::kCPU);

// Converts (B, 3, H, W) f32 in [-1, 1] to 8-bit pictures: clamp(127.5 x + 128, 0, 255) truncated, as ADM and
// DiT write samples.
std::vector<Image> to_images(const at::Tensor& pixels);

// The noise of pictures in a safetensors file, for comparisons with other programs: "noise" (N, C, H, W) f32,
// where each picture starts, and for samplers that add noise "step_noise" (steps, N, C, H, W) f32.
struct GivenNoise {
  at::Tensor start{};  // "noise"
  at::Tensor steps{};  // "step_noise"; undefined: the file has none
};

// Reads a file of noise for `num_images` pictures with latents (C, H, W) of `image_shape`. Throws Error
// naming --noise: another shape, too few pictures.
GivenNoise read_noise(const std::string& path, int64_t num_images, at::IntArrayRef image_shape);

// Writes the noise that sample_images() draws for pictures 0 to num_images - 1. Atomic. Throws Error.
void write_noise(const std::string& path, int64_t num_images, at::IntArrayRef image_shape,
                 const SampleOptions& options);

// A denoiser's forward pass as a CUDA graph. Sampling runs one shape hundreds of times, and at small batches
// launching its kernels takes longer than running them.
//
// Returns a function that gives what `forward` gives, each time in memory of its own
// (parallel/graph_cache.h). What the host reads of an input (how captions are cut) is part of its shape. Runs
// in inference mode; weights must stay where they are.
ForwardFn graphed_forward(const ForwardFn& forward, GraphOptions options);

}  // namespace kiln
