#include "ops/update/stochastic_round.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <utility>

#include "core/aten.h"
#include "core/error.h"
#include "core/philox.h"
#include "core/threads/parallel_pieces.h"
#include "ops/cuda/launch.h"
#include "ops/kernels.h"
#include "ops/op_mark.h"

namespace kiln::ops {
namespace {

constexpr int64_t kWords = 64, kGroup = 2 * kWords;  // of a group: Philox words; values, half a word each
constexpr int64_t kGroupsOfPiece = 64;
constexpr int64_t kComposedAtOnce = int64_t{1} << 20;  // values; each takes some 100 bytes when composed

uint64_t index_of(const RoundingDraw& draw) {
  return (static_cast<uint64_t>(draw.unit) << 40) + static_cast<uint64_t>(draw.update);
}

uint16_t rounded_bits(float value, uint32_t random) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + random) >> 16);
}

// Rounds values [begin, end) of group `group`.
void round_group(const float* values, uint16_t* rounded, const RoundingDraw& draw, int64_t group,
                 int64_t begin, int64_t end) {
  std::array<uint32_t, kWords> words;
  philox_words(draw.seed, Draw::kRounding, index_of(draw), static_cast<uint32_t>(group), words);
  for (int64_t i = begin; i < end; ++i) {
    const uint32_t word = words[static_cast<size_t>(i / 2)];
    rounded[i - begin] = rounded_bits(values[i - begin], i % 2 == 0 ? word & 0xFFFFu : word >> 16);
  }
}

void round_on_cpu(const at::Tensor& values, const at::Tensor& rounded, const RoundingDraw& draw) {
  const float* from = values.const_data_ptr<float>();
  auto* to = static_cast<uint16_t*>(rounded.mutable_data_ptr());
  const int64_t last = draw.first + values.numel();
  const int64_t first_group = draw.first / kGroup;
  parallel_pieces(
      at::divup(last, kGroup) - first_group, kGroupsOfPiece, [&](int64_t begin_group, int64_t end_group) {
        for (int64_t group = first_group + begin_group; group < first_group + end_group; ++group) {
          const int64_t begin = std::max(draw.first, group * kGroup),
                        end = std::min(last, (group + 1) * kGroup);
          round_group(from + begin - draw.first, to + begin - draw.first, draw, group, begin - group * kGroup,
                      end - group * kGroup);
        }
      });
}

at::Tensor left(const at::Tensor& words, int64_t bits) { return words.__lshift__(bits); }
at::Tensor right(const at::Tensor& words, int64_t bits) { return words.__rshift__(bits); }

// Returns the high and the low 32 bits of `factor` times words that are stored in int64.
std::pair<at::Tensor, at::Tensor> product_words(const at::Tensor& words, int64_t factor) {
  const at::Tensor low = (words & 0xFFFF) * factor, high = right(words, 16) * factor;
  return {right(high + right(low, 16), 16), (low + left(high & 0xFFFF, 16)) & 0xFFFFFFFF};
}

// Returns 16 random bits for each of `count` values from `first` on, in int64.
at::Tensor random_bits(const RoundingDraw& draw, int64_t first, int64_t count, at::Device device) {
  const auto options = at::TensorOptions().device(device).dtype(at::kLong);
  const at::Tensor place = at::arange(first, first + count, options);
  const at::Tensor word = right(place, 1) & (kWords - 1);
  const uint64_t index = index_of(draw);
  std::array<at::Tensor, 4> c = {left(right(place, 7), 4) + (word & 15),
                                 at::full({count}, static_cast<int64_t>(Draw::kRounding), options),
                                 at::full({count}, static_cast<int64_t>(index & 0xFFFFFFFF), options),
                                 at::full({count}, static_cast<int64_t>(index >> 32), options)};
  auto key0 = static_cast<uint32_t>(draw.seed), key1 = static_cast<uint32_t>(draw.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const auto [high0, low0] = product_words(c[0], 0xD2511F53);
    const auto [high1, low1] = product_words(c[2], 0xCD9E8D57);
    c = {high1 ^ c[1] ^ static_cast<int64_t>(key0), low1, high0 ^ c[3] ^ static_cast<int64_t>(key1), low0};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  const at::Tensor which = right(word, 4);
  at::Tensor words = c[0];
  for (int64_t w = 1; w < 4; ++w) words = at::where(which == w, c[static_cast<size_t>(w)], words);
  return words.__rshift__(left(place & 1, 4)) & 0xFFFF;
}

constexpr Kernel<decltype(round_on_cpu)> kRound{
    .cpu = round_on_cpu,
    .cuda = [](const at::Tensor& values, const at::Tensor& rounded, const RoundingDraw& draw) {
      cuda::stochastic_round(values, rounded, static_cast<uint64_t>(draw.first), draw.seed,
                             static_cast<uint32_t>(Draw::kRounding), index_of(draw));
    }};

void check_rounding(const at::Tensor& values, const at::Tensor& rounded, const RoundingDraw& draw) {
  if (values.dim() != 1 || values.scalar_type() != at::kFloat || rounded.scalar_type() != at::kBFloat16 ||
      values.sizes() != rounded.sizes() || !values.is_contiguous() || !rounded.is_contiguous() ||
      values.device() != rounded.device())
    fail("stochastic_round",
         "expected flat f32 values and as many bf16 ones on {}, got {} {} and {} {} on {}",
         values.device().str(), c10::toString(values.scalar_type()), c10::str(values.sizes()),
         c10::toString(rounded.scalar_type()), c10::str(rounded.sizes()), rounded.device().str());
  if (draw.first < 0 || draw.unit < 0 || draw.unit >= int64_t{1} << 24 || draw.update < 0 ||
      draw.update >= int64_t{1} << 40 || draw.first + values.numel() > int64_t{1} << 35)
    fail("stochastic_round", "unit {}, update {} or position {} is out of range", draw.unit, draw.update,
         draw.first);
}

}  // namespace

void stochastic_round(const at::Tensor& values, const at::Tensor& rounded, const RoundingDraw& draw) {
  check_rounding(values, rounded, draw);
  OpMark mark("kiln::stochastic_round", values);
  mark.outputs(rounded);
  if (values.numel() == 0) return;
  const auto kernel = kRound.serving(values);
  (kernel ? kernel : reference::stochastic_round)(values, rounded, draw);
}

namespace reference {

void stochastic_round(const at::Tensor& values, const at::Tensor& rounded, const RoundingDraw& draw) {
  const at::NoGradGuard no_grad;
  for (int64_t begin = 0; begin < values.numel(); begin += kComposedAtOnce) {
    const int64_t count = std::min(kComposedAtOnce, values.numel() - begin);
    const at::Tensor part = values.narrow(0, begin, count);
    const at::Tensor bits = part.view(at::kInt).to(at::kLong) & 0xFFFFFFFF;
    const at::Tensor random = random_bits(draw, draw.first + begin, count, values.device());
    const at::Tensor moved = at::where(at::isnan(part), right(bits, 16) | 0x40, right(bits + random, 16));
    rounded.narrow(0, begin, count).view(at::kShort).copy_(moved);
  }
}

}  // namespace reference
}  // namespace kiln::ops
