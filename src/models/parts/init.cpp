#include "models/parts/init.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "core/aten.h"
#include "core/philox.h"
#include "core/threads/parallel_pieces.h"

namespace kiln {
namespace {

// Returns the FNV-1a hash of a weight's key, which names its random stream.
uint64_t stream_of(const std::string& key) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const unsigned char c : key) hash = (hash ^ c) * 0x100000001b3u;
  return hash;
}

// Fills with draws in [-bound, bound) of 24 bits each. A Philox block gives four.
void fill_uniform(float* out, int64_t n, double bound, uint64_t seed, uint64_t stream) {
  const std::array<uint32_t, 2> key = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  parallel_pieces((n + 3) / 4, 1 << 14, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const auto bits = philox4x32_10({static_cast<uint32_t>(block), static_cast<uint32_t>(Draw::kInit),
                                       static_cast<uint32_t>(stream), static_cast<uint32_t>(stream >> 32)},
                                      key);
      for (int64_t i = 4 * block; i < std::min(4 * block + 4, n); ++i) {
        const double unit = static_cast<double>(bits[i % 4] >> 8) * 0x1p-23 - 1.0;
        out[i] = static_cast<float>(unit * bound);
      }
    }
  });
}

}  // namespace

Init Init::constant(at::Tensor value) { return {.kind = Kind::kValue, .value = std::move(value)}; }

void initialize(const Init& init, uint64_t seed, const std::string& key, at::Tensor& out) {
  const int64_t n = out.numel();
  switch (init.kind) {
    case Init::Kind::kZeros:
      out.zero_();
      return;
    case Init::Kind::kOnes:
      out.fill_(1);
      return;
    case Init::Kind::kValue:
      out.copy_(init.value);
      return;
    case Init::Kind::kUniform:
      fill_uniform(out.mutable_data_ptr<float>(), n, init.scale, seed, stream_of(key));
      return;
    case Init::Kind::kXavierUniform: {
      const double bound = std::sqrt(6.0 / static_cast<double>(init.fan_in + init.fan_out));
      fill_uniform(out.mutable_data_ptr<float>(), n, bound, seed, stream_of(key));
      return;
    }
    case Init::Kind::kNormal:
      philox_normal(seed, Draw::kInit, stream_of(key),
                    std::span(out.mutable_data_ptr<float>(), static_cast<size_t>(n)));
      out.mul_(init.scale);
      return;
  }
}

}  // namespace kiln
