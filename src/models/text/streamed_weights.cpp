#include "models/text/streamed_weights.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "core/aten.h"
#include "core/files/mapped_file.h"

namespace kiln {
namespace {

// Values converted at once. So few that a conversion runs on the reading thread alone and leaves the other
// threads to the compute.
constexpr int64_t kValuesAtOnce = 1 << 14;
constexpr int64_t kValuesBetweenReleases = 1 << 21, kRowsBetweenReleases = 256;

std::span<const std::byte> bytes_of(const at::Tensor& stored) {
  return {static_cast<const std::byte*>(stored.const_data_ptr()), stored.nbytes()};
}

// Converts a mapped tensor. Keeps no more than a few MiB of the file in this process's memory.
at::Tensor converted(const at::Tensor& stored, at::ScalarType dtype) {
  at::Tensor values = at::empty(stored.sizes(), stored.options().dtype(dtype));
  const at::Tensor from = stored.flatten(), to = values.flatten();
  for (int64_t first = 0; first < from.numel(); first += kValuesAtOnce) {
    const int64_t count = std::min(kValuesAtOnce, from.numel() - first);
    to.narrow(0, first, count).copy_(from.narrow(0, first, count));
    const int64_t end = first + count;
    if (end % kValuesBetweenReleases != 0 && end != from.numel()) continue;
    const int64_t begin = (end - 1) / kValuesBetweenReleases * kValuesBetweenReleases;
    MappedFile::release(bytes_of(from.narrow(0, begin, end - begin)));
  }
  return values;
}

// Returns the values on `device` in `dtype`. Copies to a GPU on the current stream.
at::Tensor brought(const at::Tensor& stored, at::ScalarType dtype, at::Device device) {
  const bool as_stored = stored.scalar_type() == dtype;
  if (as_stored) MappedFile::fetch(bytes_of(stored));
  at::Tensor host = as_stored ? stored : converted(stored, dtype);
  if (device.is_cpu()) return host;
  at::Tensor value = host.to(device);
  MappedFile::release(bytes_of(stored));
  return value;
}

int64_t bytes_in_use(const Parameter& parameter) {
  return parameter.value.numel() * static_cast<int64_t>(parameter.value.element_size());
}

}  // namespace

// While this lives, a segment has its weights.
class StreamedWeights::Entered {
 public:
  Entered(StreamedWeights& weights, size_t segment) : weights_(weights), segment_(segment) {
    weights.enter(segment);
  }
  ~Entered() { weights_.leave(segment_); }
  Entered(const Entered&) = delete;

 private:
  StreamedWeights& weights_;
  size_t segment_;
};

StreamedWeights::StreamedWeights(const TextEncoder& encoder, std::map<std::string, at::Tensor> stored,
                                 at::Device device)
    : encoder_(encoder), stored_(std::move(stored)), device_(device) {
  int64_t before = 0;
  for (const auto& segment : encoder.segments()) {
    Values& outline = outlines_.emplace_back();
    int64_t own = 0;
    for (const auto& parameter : segment->parameters()) {
      outline.push_back(parameter->value);
      if (is_table(*parameter)) continue;
      own += bytes_in_use(*parameter);
      bytes_of_pass_ += static_cast<int64_t>(stored_.at(parameter->key).nbytes());
    }
    resident_bytes_ = std::max(resident_bytes_, before + own);
    before = own;
  }
}

void StreamedWeights::encode(std::span<const TextBatch> batches,
                             const std::function<void(size_t, at::Tensor)>& take) {
  const at::NoGradGuard no_grad;
  for (const TextBatch& batch : batches) encoder_.check(batch.tokens);
  const auto& segments = encoder_.segments();
  std::vector<State> states(batches.size());
  for (size_t i = 0; i < segments.size(); ++i) {
    const Entered entered(*this, i);
    for (size_t b = 0; b < batches.size(); ++b) {
      states[b] = i == 0 ? embed(batches[b].tokens) : encoder_.forward_segment(i, states[b], batches[b]);
      if (i + 1 == segments.size()) take(b, std::exchange(states[b], {}).hidden);
    }
  }
}

// Reads only the rows of the token table that the texts need, and renumbers their ids accordingly.
State StreamedWeights::embed(const TokenRows& tokens) const {
  Parameter& table = *encoder_.token_table();
  const at::Tensor &stored = stored_.at(table.key), ids = tokens.ids.to(at::kCPU).contiguous();
  const std::span<const int64_t> asked(ids.const_data_ptr<int64_t>(), static_cast<size_t>(ids.numel()));
  std::vector<int64_t> rows(asked.begin(), asked.end());
  std::ranges::sort(rows);
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  const at::Tensor outline = table.value;
  const auto num_rows = static_cast<int64_t>(rows.size());
  const at::Tensor values =
      at::empty({num_rows, stored.size(1)}, stored.options().dtype(outline.scalar_type()));
  for (int64_t i = 0; i < num_rows; ++i) {
    values[i].copy_(stored[rows[i]]);
    if ((i + 1) % kRowsBetweenReleases == 0 || i + 1 == num_rows) MappedFile::release(bytes_of(stored));
  }
  std::vector<int64_t> places;
  places.reserve(asked.size());
  for (const int64_t id : asked) places.push_back(std::ranges::lower_bound(rows, id) - rows.begin());
  TokenRows renumbered = tokens;
  renumbered.ids = at::tensor(places, at::kLong).to(device_);
  table.value = values.to(device_);
  State state = encoder_.segments().front()->forward({}, {.tokens = renumbered});
  table.value = outline;
  return state;
}

// Reads a segment's weights. Runs on its own thread, and for a GPU on its own stream.
StreamedWeights::Values StreamedWeights::read(size_t segment) const {
  const at::NoGradGuard no_grad;
  if (!device_.is_cpu()) {
    const c10::impl::VirtualGuardImpl driver(device_.type());
    driver.setDevice(device_);
    driver.exchangeStream(driver.getStreamFromGlobalPool(device_));
  }
  Values values;
  const Segment& values_of = *encoder_.segments()[segment];
  for (const auto& parameter : values_of.parameters())
    values.push_back(is_table(*parameter)
                         ? at::Tensor()
                         : brought(stored_.at(parameter->key), parameter->value.scalar_type(), device_));
  return values;
}

void StreamedWeights::enter(size_t segment) {
  const auto begin_reading = [this](size_t next) {
    next_ = next;
    reading_ = std::async(std::launch::async, [this, next] { return read(next); });
  };
  if (!reading_.valid() || next_ != segment) begin_reading(segment);
  const Values values = reading_.get();
  if (segment + 1 < outlines_.size()) begin_reading(segment + 1);
  const ParameterList& parameters = encoder_.segments()[segment]->parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!values[i].defined()) continue;
    parameters[i]->value = values[i];
    if (!device_.is_cpu())  // it was made on another stream than the one that uses it
      values[i].record_stream(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  }
}

void StreamedWeights::leave(size_t segment) {
  const ParameterList& parameters = encoder_.segments()[segment]->parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    parameters[i]->value = outlines_[segment][i];
    MappedFile::release(bytes_of(stored_.at(parameters[i]->key)));
  }
}

}  // namespace kiln
