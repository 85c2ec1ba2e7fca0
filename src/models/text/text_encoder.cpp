#include "models/text/text_encoder.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <vector>

#include "core/allocations.h"
#include "core/aten.h"
#include "core/error.h"
#include "core/tensors.h"

namespace kiln {

void TextEncoder::check(const TokenRows& tokens) const {
  const auto& offsets = tokens.host_offsets;
  if (offsets.size() < 2) fail("text", "expected at least one text");
  for (size_t b = 1; b < offsets.size(); ++b) {
    const int64_t length = offsets[b] - offsets[b - 1];
    if (length < 1) fail("text", "text {} has no tokens", b - 1);
    if (shape_.max_tokens > 0 && length > shape_.max_tokens)
      fail("text", "text {} has {} tokens, {} takes {} at most", b - 1, length, shape_.family,
           shape_.max_tokens);
  }
  const auto ids = range_of(tokens.ids);
  if (ids && (ids->first < 0 || ids->second >= shape_.vocabulary_size))
    fail("text", "expected token ids in 0..{}, got {}..{}: another tokenizer?", shape_.vocabulary_size - 1,
         ids->first, ids->second);
}

at::Tensor TextEncoder::encode_batch(const TextBatch& batch) const {
  check(batch.tokens);
  State state;
  for (size_t i = 0; i < segments_.size(); ++i) state = forward_segment(i, state, batch);
  return state.hidden;
}

TextFeatures TextEncoder::encode(const TokenRows& tokens) const {
  check(tokens);
  const ModelInput input{.tokens = tokens};
  TextFeatures features;
  State state;
  for (size_t i = 0; i < segments_.size(); ++i) {
    state = segments_[i]->forward(state, input);
    if (static_cast<int64_t>(i) == shape_.penultimate_segment) features.penultimate = state.hidden;
  }
  features.last_hidden = state.hidden;
  features.pooled = pool(features.last_hidden, tokens);
  return features;
}

BatchMemory planned_batch(const TextEncoder& encoder, const std::vector<int64_t>& host_offsets,
                          at::Device device) {
  const at::NoGradGuard no_grad;
  const DryRunScope dry_run(dry_run_of(device));
  MetaMeter meter;
  const MetaAllocationScope metering(meter);
  const TokenRows tokens{
      .ids = at::empty({host_offsets.back()}, at::TensorOptions(at::kMeta).dtype(at::kLong)),
      .host_offsets = host_offsets};
  BatchMemory memory;
  State state;
  for (const auto& segment : encoder.segments()) {
    state = segment->forward(state, {.tokens = tokens});
    memory.state_bytes = std::max(memory.state_bytes, meter.live);
  }
  memory.peak_bytes = meter.peak;
  return memory;
}

BatchMemory planned_batch(const TextEncoder& encoder, int64_t batch, int64_t length, at::Device device) {
  std::vector<int64_t> offsets;
  for (int64_t b = 0; b <= batch; ++b) offsets.push_back(b * length);
  return planned_batch(encoder, offsets, device);
}

}  // namespace kiln
