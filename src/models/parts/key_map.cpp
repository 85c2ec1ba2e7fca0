#include "models/parts/key_map.h"

#include <fmt/ranges.h>

#include "core/aten.h"
#include "core/error.h"
#include "core/text/some_of.h"

namespace kiln {
namespace {

// Hands out tensors by key and remembers which keys were missing and which are left.
class Taker {
 public:
  Taker(const TensorMap& weights, const std::string& source) : rest_(weights), source_(source) {}

  at::Tensor take(const std::string& key) {
    const auto found = rest_.find(key);
    if (found == rest_.end()) {
      missing_.push_back(key);
      return {};
    }
    at::Tensor tensor = found->second;
    rest_.erase(found);
    return tensor;
  }
  void ignore(const std::string& key) { rest_.erase(key); }

  void finish() const {
    std::vector<std::string> problems, unknown;
    for (const auto& [key, tensor] : rest_) unknown.push_back(key);
    if (!missing_.empty()) problems.push_back("missing keys: " + some_of(missing_));
    if (!unknown.empty()) problems.push_back("unknown keys: " + some_of(unknown));
    if (!problems.empty())
      fail("weights", "{} does not fit the model: {}", source_, fmt::join(problems, "; "));
  }

 private:
  TensorMap rest_;
  std::string source_;
  std::vector<std::string> missing_;
};

}  // namespace

void KeyMap::rename_layer(const std::string& fused, const std::string& parted) {
  for (const char* suffix : {".weight", ".bias"}) renamed.emplace_back(fused + suffix, parted + suffix);
}

void KeyMap::add_projection(const std::string& fused, const std::vector<std::string>& parts, bool bias) {
  for (const char* suffix : {".weight", ".bias"}) {
    Projection projection{.fused = fused + suffix, .parts = parts};
    for (std::string& part : projection.parts) part += suffix;
    projections.push_back(std::move(projection));
    if (!bias) return;
  }
}

TensorMap parted_weights(const KeyMap& map, const TensorMap& fused, const std::string& source) {
  Taker taker(fused, source);
  TensorMap parted;
  for (const auto& [from, to] : map.renamed) parted[to] = taker.take(from);
  for (const KeyMap::Projection& projection : map.projections) {
    const at::Tensor whole = taker.take(projection.fused);
    const auto count = static_cast<int64_t>(projection.parts.size());
    if (!whole.defined()) continue;
    if (whole.dim() < 1 || whole.size(0) % count != 0)
      fail("weights", "{} has {} rows, expected a multiple of {} ({})", projection.fused,
           whole.dim() < 1 ? 0 : whole.size(0), count, source);
    const std::vector<at::Tensor> parts = whole.chunk(count, 0);
    for (size_t i = 0; i < parts.size(); ++i) parted[projection.parts[i]] = parts[i].contiguous();
  }
  for (const std::string& key : map.fused_only) taker.ignore(key);
  taker.finish();
  return parted;
}

TensorMap fused_weights(const KeyMap& map, const TensorMap& parted, const std::string& source) {
  Taker taker(parted, source);
  TensorMap fused;
  for (const auto& [to, from] : map.renamed) fused[to] = taker.take(from);
  for (const KeyMap::Projection& projection : map.projections) {
    std::vector<at::Tensor> parts;
    for (const std::string& part : projection.parts) {
      const at::Tensor tensor = taker.take(part);
      if (!tensor.defined()) continue;
      if (!parts.empty() && tensor.sizes() != parts[0].sizes())
        fail("weights", "{} is ({}), expected ({}) as {} ({})", part, fmt::join(tensor.sizes(), ", "),
             fmt::join(parts[0].sizes(), ", "), projection.parts[0], source);
      parts.push_back(tensor);
    }
    if (!parts.empty()) fused[projection.fused] = at::cat(parts, 0);
  }
  taker.finish();
  return fused;
}

}  // namespace kiln
