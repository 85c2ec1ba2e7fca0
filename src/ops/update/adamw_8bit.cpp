#include "ops/update/adamw_8bit.h"

#include <ATen/Parallel.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "core/aten.h"
#include "core/error.h"
#include "core/tensors.h"
#include "core/threads/parallel_pieces.h"
#include "ops/cpu/adamw_8bit.h"
#include "ops/kernel_args.h"
#include "ops/kernels.h"
#include "ops/op_mark.h"

namespace kiln::ops {
namespace {

static_assert(cpu::kBlock8bit == kBlockOf8Bits);

constexpr int64_t kBlocksOfPiece = 32;

// A PlaceTable together with the memory that it points to.
class OwnedTable {
 public:
  explicit OwnedTable(bool is_signed) {
    const at::Tensor map = dynamic_map(is_signed);
    values_.assign(map.const_data_ptr<float>(), map.const_data_ptr<float>() + 256);
    for (const bool negative : {false, true})
      if (is_signed || !negative)
        for (uint32_t part = 0; part < cpu::num_parts(is_signed); ++part)
          entries_.push_back(entry_of(part, is_signed, negative));
    table_ = {.values = values_.data(), .entries = entries_.data(), .is_signed = is_signed};
  }
  const cpu::PlaceTable& table() const { return table_; }

 private:
  // Returns the entry of a part. The first part also holds everything smaller.
  uint32_t entry_of(uint32_t part, bool is_signed, bool negative) const {
    const int rest_bits = cpu::part_bits(is_signed);
    const uint32_t last_bits = (1u << rest_bits) - 1, first = cpu::first_part(is_signed) + part;
    const float begin = part == 0 ? 0 : std::bit_cast<float>(first << rest_bits),
                end = std::bit_cast<float>((first + 1) << rest_bits);
    uint32_t below = 0, rest = last_bits;  // no value is above these bits
    int within = 0;
    for (size_t i = 0; i + 1 < values_.size(); ++i) {
      const float midpoint = (values_[i + 1] + values_[i]) / 2, magnitude = std::abs(midpoint);
      const bool is_within = std::signbit(midpoint) == negative && magnitude >= begin && magnitude < end;
      if (is_within) {
        rest = std::bit_cast<uint32_t>(magnitude) & last_bits;
        if (negative) rest ^= last_bits;
        ++within;
      } else if (negative ? midpoint <= -end : midpoint < begin) {
        ++below;
      }
    }
    TORCH_INTERNAL_ASSERT(within == 0 || (within == 1 && part > 0));
    return below << rest_bits | rest;
  }

  std::vector<float> values_;
  std::vector<uint32_t> entries_;
  cpu::PlaceTable table_{};
};

void check_arguments(const at::Tensor& weights, const at::Tensor& grads, const Moment8bit& mean,
                     const Moment8bit& square, const at::Tensor& compute) {
  const auto check = [&](const char* name, const at::Tensor& tensor, bool has_dtype, int64_t count) {
    if (tensor.dim() != 1 || !tensor.is_contiguous() || !has_dtype || tensor.numel() != count ||
        tensor.device() != weights.device())
      fail("adamw_8bit_step_", "{}: expected {} flat elements on {} of its type, got {} {} on {}", name,
           count, weights.device().str(), c10::toString(tensor.scalar_type()), c10::str(tensor.sizes()),
           tensor.device().str());
  };
  const int64_t count = weights.numel(), blocks = at::divup(count, kBlockOf8Bits);
  check("weights (f32)", weights, weights.scalar_type() == at::kFloat, count);
  check("gradients (f32, bf16 or fp16)", grads, is_kernel_dtype(grads.scalar_type()), count);
  for (const Moment8bit* moment : {&mean, &square}) {
    check("a moment's places (u8)", moment->places, moment->places.scalar_type() == at::kByte, count);
    check("a moment's scales (f32)", moment->scales, moment->scales.scalar_type() == at::kFloat, blocks);
  }
  if (compute.defined())
    check("weights that compute (bf16 or fp16)", compute,
          is_kernel_dtype(compute.scalar_type()) && compute.scalar_type() != at::kFloat, count);
}

}  // namespace

// For each power of ten from 1e-6 to 1, there are twice as many values as for the one before. They are the
// middles of equal parts of [0.1, 1] times the power. Then come 0 and 1.
at::Tensor dynamic_map(bool is_signed) {
  constexpr int kPowers = 7;
  std::vector<at::Tensor> values = {at::zeros({1}), at::ones({1})};
  for (int i = 0; i < kPowers; ++i) {
    const int64_t count = int64_t{1} << (is_signed ? i : i + 1);
    const at::Tensor ends = at::linspace(0.1, 1, count + 1, at::TensorOptions(at::kFloat));
    const at::Tensor middles =
        (ends.narrow(0, 0, count) + ends.narrow(0, 1, count)) / 2.0 * std::pow(10.0, i + 1 - kPowers);
    values.push_back(middles);
    if (is_signed) values.push_back(-middles);
  }
  return std::get<0>(at::cat(values).sort());
}

namespace {

void step_on_cpu(const at::Tensor& weights, const at::Tensor& grads, const Moment8bit& mean,
                 const Moment8bit& square, const at::Tensor& compute, const AdamWStep& options) {
  static const OwnedTable kSigned(/*is_signed=*/true), kUnsigned(/*is_signed=*/false);
  const cpu::Adamw8bitElements elements = {
      .size = static_cast<size_t>(weights.numel()),
      .weights = weights.mutable_data_ptr<float>(),
      .grads = grads.const_data_ptr(),
      .grad_dtype = from_scalar_type(grads.scalar_type()),
      .mean = mean.places.mutable_data_ptr<uint8_t>(),
      .square = square.places.mutable_data_ptr<uint8_t>(),
      .mean_scales = mean.scales.mutable_data_ptr<float>(),
      .square_scales = square.scales.mutable_data_ptr<float>(),
      .compute = compute.defined() ? compute.mutable_data_ptr() : nullptr,
      .compute_dtype = compute.defined() ? from_scalar_type(compute.scalar_type()) : Dtype::kF32,
      .streams = weights.numel() >= kStreamedElements};
  const cpu::Adamw8bitFactors factors = {.adamw = step_factors(options),
                                         .beta1 = static_cast<float>(options.beta1)};
  parallel_pieces(at::divup(weights.numel(), kBlockOf8Bits), kBlocksOfPiece, [&](int64_t begin, int64_t end) {
    cpu::adamw_8bit(elements, factors, kSigned.table(), kUnsigned.table(), static_cast<size_t>(begin),
                    static_cast<size_t>(end));
  });
}

constexpr Kernel<decltype(step_on_cpu)> kStep8bit{.cpu = step_on_cpu};

}  // namespace

void adamw_8bit_step_(const at::Tensor& weights, const at::Tensor& grads, const Moment8bit& mean,
                      const Moment8bit& square, const at::Tensor& compute, const AdamWStep& options) {
  check_arguments(weights, grads, mean, square, compute);
  const auto kernel = kStep8bit.on(weights);
  if (!kernel) return reference::adamw_8bit_step_(weights, grads, mean, square, compute, options);
  OpMark mark("kiln::adamw_8bit", weights, grads, mean.places, square.places);
  mark.outputs(weights, mean.places, square.places, compute);
  if (weights.numel() > 0) kernel(weights, grads, mean, square, compute, options);
}

}  // namespace kiln::ops
