#include "sample/sampler_loop.h"

#include <fmt/ranges.h>

#include <numeric>
#include <vector>

#include "checkpoint/tensor_files.h"
#include "core/aten.h"
#include "core/error.h"
#include "diffusion/sampler_noise.h"

namespace kiln {
namespace {

// Throws Error unless the last dimensions of the noise are (N, C, H, W) with enough pictures.
void check_noise(const char* name, const at::Tensor& noise, int64_t dim, const std::string& path,
                 int64_t num_images, at::IntArrayRef image_shape) {
  const at::IntArrayRef sizes = noise.sizes();
  if (noise.dim() != dim || sizes.slice(static_cast<size_t>(dim - 3)) != image_shape ||
      sizes[static_cast<size_t>(dim - 4)] < num_images)
    fail("sample", "--noise {}: expected \"{}\" of {}{} pictures or more of {}, got {}", path, name,
         dim == 5 ? "steps x " : "", num_images, fmt::join(image_shape, " x "), fmt::join(sizes, " x "));
}

}  // namespace

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

}  // namespace kiln
