// Pieces that objectives share.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>

namespace kiln {

// (B, C, H, W) -> (B).
at::Tensor mean_per_image(const at::Tensor& values);

// u (B) f64 in [0, 1] -> floor(u * count), at most count - 1; (B) i64.
at::Tensor uniform_index(const at::Tensor& u, int64_t count);

// Throws Error unless prediction has `expected` channels; `why` says where that number comes from.
void check_channels(std::string_view who, const at::Tensor& prediction, int64_t expected,
                    std::string_view why);

// The first `channels` channels in f32. A model that also predicts a sigma (2 * channels) has it dropped.
at::Tensor predicted_channels(std::string_view who, const at::Tensor& prediction, int64_t channels);

}  // namespace kiln
