#include "models/parts/adapter_dropout.h"

#include <cmath>
#include <string>
#include <utility>

#include "core/aten.h"
#include "core/philox.h"

namespace kiln {
namespace {

thread_local const DropoutDraws* current_draws = nullptr;

// SplitMix64 (Steele et al. 2014) in signed integers, which wrap around alike on every device. A right shift
// copies the sign bit; the mask removes the copies.
constexpr auto kGolden = static_cast<int64_t>(0x9e3779b97f4a7c15);

at::Tensor xor_shifted(const at::Tensor& z, int64_t bits) {
  const int64_t mask = static_cast<int64_t>(~uint64_t{0} >> bits);
  return z.bitwise_xor(z.bitwise_right_shift(bits).bitwise_and(mask));
}

at::Tensor mixed(const at::Tensor& counter) {
  at::Tensor z = xor_shifted(counter, 30) * static_cast<int64_t>(0xbf58476d1ce4e5b9);
  z = xor_shifted(z, 27) * static_cast<int64_t>(0x94d049bb133111eb);
  return xor_shifted(z, 31);
}

int64_t stream_of(uint64_t seed, const std::string& layer) {
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  for (const unsigned char c : layer) hash = (hash ^ c) * 0x100000001b3u;
  const auto words = philox4x32_10({static_cast<uint32_t>(hash), static_cast<uint32_t>(hash >> 32),
                                    static_cast<uint32_t>(Draw::kAdapterDrop), 0},
                                   {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  return static_cast<int64_t>(static_cast<uint64_t>(words[0]) << 32 | words[1]);
}

// The sample of each row, and the row's index in its sample.
struct RowNames {
  at::Tensor sample, row;  // (count) i64
};

// With `has_own_rows` all samples have equally many rows. Otherwise the rows are those of captions in one
// list, which may have padding after the last.
RowNames row_names(int64_t count, bool has_own_rows, const DropoutDraws& draws, at::Device device) {
  const at::Tensor all = at::arange(count, at::TensorOptions(device).dtype(at::kLong));
  if (has_own_rows || count == draws.num_samples) {
    const int64_t each = count / draws.num_samples;
    const at::Tensor sample = all.div(each, "floor");
    return {.sample = sample, .row = all - sample * each};
  }
  const at::Tensor ends = draws.text_offsets.to(at::kLong).narrow(0, 1, draws.num_samples).unsqueeze(0);
  const at::Tensor is_behind =
      all.unsqueeze(1) >= ends;  // (count, samples): true if the caption ends before the row
  return {.sample = is_behind.sum(1), .row = all - (is_behind.to(at::kLong) * ends).amax(1)};
}

// Returns (rows, channels) bool: true for the elements of x (.., channels) that stay.
at::Tensor kept_elements(const at::Tensor& x, const Adapter& adapter) {
  const DropoutDraws& draws = *current_draws;
  const int64_t channels = x.size(-1);
  const RowNames names = row_names(x.numel() / channels, x.dim() > 2, draws, x.device());
  const at::Tensor of_sample =
      mixed((names.sample + draws.first_position) * kGolden + stream_of(draws.seed, adapter.down->key));
  const at::Tensor of_row = mixed(of_sample + names.row * kGolden);
  const at::Tensor columns = at::arange(1, channels + 1, names.row.options()) * kGolden;
  constexpr int kBits = 53;
  const at::Tensor drawn = mixed(of_row.unsqueeze(1) + columns)
                               .bitwise_right_shift(64 - kBits)
                               .bitwise_and((int64_t{1} << kBits) - 1);
  return drawn >= static_cast<int64_t>(adapter.dropout * std::ldexp(1.0, kBits));
}

}  // namespace

DropoutScope::DropoutScope(const DropoutDraws& draws) : before_(std::exchange(current_draws, &draws)) {}
DropoutScope::~DropoutScope() { current_draws = before_; }

at::Tensor with_dropout(const at::Tensor& x, const Adapter& adapter) {
  if (adapter.dropout <= 0 || current_draws == nullptr) return x;
  at::Tensor kept;
  {
    const at::NoGradGuard no_grad;
    const bool is_picture = x.dim() == 4 && adapter.down->value.dim() == 4;
    const at::Tensor rows = is_picture ? x.permute({0, 2, 3, 1}) : x;
    kept = kept_elements(rows, adapter).view(rows.sizes());
    if (is_picture) kept = kept.permute({0, 3, 1, 2});
    kept = kept.to(x.scalar_type()) / (1 - adapter.dropout);
  }
  return x * kept;
}

}  // namespace kiln
