// Pieces that objectives and samplers share.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>

namespace kiln {

// Averages per image: (B, C, H, W) -> (B).
at::Tensor mean_per_image(const at::Tensor& values);

// Turns u (B) f64 in [0, 1] into indices floor(u * count), at most count - 1; (B) i64.
at::Tensor uniform_index(const at::Tensor& u, int64_t count);

// Throws Error unless prediction has `expected` channels. `why`: the reason for that number.
void check_channels(std::string_view who, const at::Tensor& prediction, int64_t expected,
                    std::string_view why);

// Returns the first `channels` channels in f32. Drops the sigma of a model that also predicts one (2 *
// channels).
at::Tensor predicted_channels(std::string_view who, const at::Tensor& prediction, int64_t channels);

}  // namespace kiln
