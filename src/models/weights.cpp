#include "models/weights.h"

#include <xxhash.h>

#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <memory>
#include <set>
#include <vector>

#include "core/aten.h"
#include "core/error.h"
#include "core/files/mapped_file.h"
#include "core/text/some_of.h"
#include "models/parts/init.h"

namespace kiln {
namespace {

// True for position tables and the like. A file may leave them out, because they can be computed.
bool is_computed(const Parameter& parameter) {
  return !parameter.trainable && parameter.init.kind == Init::Kind::kValue;
}

std::string sizes_text(const at::Tensor& tensor) {
  return fmt::format("({})", fmt::join(tensor.sizes(), ", "));
}

// The rule by which a weight gets its values: those that are given, or else fresh ones.
void fill(Parameter& parameter, const at::Tensor& given, uint64_t seed) {
  at::Tensor& value = parameter.value;
  const bool is_drawn_in_place = value.is_cpu() && value.is_contiguous() && value.scalar_type() == at::kFloat;
  at::Tensor values = given;
  if (!given.defined()) {
    values = is_drawn_in_place ? value : at::empty(value.sizes(), at::kFloat);
    initialize(parameter.init, seed, parameter.key, values);
  }
  if (!values.is_same(value)) value.copy_(values);
}

}  // namespace

void initialize_weights(const ParameterList& parameters, uint64_t seed) {
  const at::NoGradGuard no_grad;
  for (const auto& parameter : parameters) fill(*parameter, {}, seed);
}

void initialize_weights(const Denoiser& denoiser, uint64_t seed) {
  initialize_weights(denoiser.parameters(), seed);
}

void load_weights(const ParameterList& parameters, const std::map<std::string, at::Tensor>& weights,
                  const std::string& source) {
  std::vector<std::string> missing, unknown, wrong;
  std::set<std::string> known;
  for (const auto& parameter : parameters) {
    known.insert(parameter->key);
    const auto found = weights.find(parameter->key);
    if (found == weights.end()) {
      if (!is_computed(*parameter)) missing.push_back(parameter->key);
    } else if (found->second.sizes() != parameter->value.sizes()) {
      wrong.push_back(fmt::format("{} is {}, expected {}", parameter->key, sizes_text(found->second),
                                  sizes_text(parameter->value)));
    }
  }
  for (const auto& [key, tensor] : weights)
    if (!known.contains(key)) unknown.push_back(key);
  std::vector<std::string> problems;
  if (!missing.empty()) problems.push_back("missing keys: " + some_of(missing));
  if (!unknown.empty()) problems.push_back("unknown keys: " + some_of(unknown));
  if (!wrong.empty()) problems.push_back("wrong shapes: " + some_of(wrong, "; "));
  if (!problems.empty()) fail("weights", "{} does not fit the model: {}", source, fmt::join(problems, "; "));

  const at::NoGradGuard no_grad;
  for (const auto& parameter : parameters) {
    const auto found = weights.find(parameter->key);
    fill(*parameter, found == weights.end() ? parameter->init.value : found->second, /*seed=*/0);
  }
}

void load_weights(const Denoiser& denoiser, const std::map<std::string, at::Tensor>& weights,
                  const std::string& source) {
  load_weights(denoiser.parameters(), weights, source);
}

void freeze_convolution_weights(const ParameterList& parameters, at::ScalarType compute_dtype) {
  const at::NoGradGuard no_grad;
  for (const auto& parameter : parameters) {
    at::Tensor value = parameter->value.to(compute_dtype);
    if (value.dim() == 4) value = value.contiguous(at::MemoryFormat::ChannelsLast);
    parameter->value = value;
  }
}

std::string weights_fingerprint(const std::map<std::string, at::Tensor>& weights) {
  constexpr int64_t kHashedAtOnce = 1 << 20;
  const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state(XXH3_createState(),
                                                                              XXH3_freeState);
  XXH3_64bits_reset(state.get());
  for (const auto& [key, value] : weights) {
    XXH3_64bits_update(state.get(), key.data(), key.size());
    XXH3_64bits_update(state.get(), value.sizes().data(), value.sizes().size() * sizeof(int64_t));
    const at::Tensor values = value.flatten();
    for (int64_t first = 0; first < values.numel(); first += kHashedAtOnce) {
      const at::Tensor part = values.narrow(0, first, std::min(kHashedAtOnce, values.numel() - first));
      const at::Tensor as_f32 = part.to(at::kCPU, at::kFloat);
      XXH3_64bits_update(state.get(), as_f32.const_data_ptr(), as_f32.nbytes());
      MappedFile::release({static_cast<const std::byte*>(part.const_data_ptr()), part.nbytes()});
    }
  }
  return fmt::format("xxh3:{:016x}", XXH3_64bits_digest(state.get()));
}

}  // namespace kiln
