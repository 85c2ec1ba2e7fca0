#include "diffusion/sampler_noise.h"

#include <span>

#include "core/philox.h"
#include "core/threads/parallel_pieces.h"

namespace kiln {
namespace {

// Draws image b from `index_of(images[b])`.
template <class IndexOf>
void fill_normal(uint64_t seed, Draw draw, const std::vector<int64_t>& images, const at::Tensor& noise,
                 const IndexOf& index_of) {
  const int64_t size = images.empty() ? 0 : noise.numel() / noise.size(0);
  float* data = noise.mutable_data_ptr<float>();
  parallel_pieces(static_cast<int64_t>(images.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b)
      philox_normal(seed, draw, index_of(images[b]), std::span(data + b * size, static_cast<size_t>(size)));
  });
}

}  // namespace

void fill_start_noise(uint64_t seed, const std::vector<int64_t>& images, const at::Tensor& noise) {
  fill_normal(seed, Draw::kSampleStart, images, noise,
              [](int64_t image) { return static_cast<uint64_t>(image); });
}

void fill_step_noise(uint64_t seed, const std::vector<int64_t>& images, int64_t step,
                     const at::Tensor& noise) {
  constexpr int kStepBits = 20;  // a million steps, 2^44 images
  fill_normal(seed, Draw::kSampleStep, images, noise, [step](int64_t image) {
    return (static_cast<uint64_t>(image) << kStepBits) | static_cast<uint64_t>(step);
  });
}

}  // namespace kiln
