#include "models/forward_flops.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <tuple>

#include "core/aten.h"
#include "core/dry_run.h"
#include "models/registry.h"
#include "ops/op_recorder.h"

namespace kiln {
namespace {

// Captions are projected in blocks of so many rows (models/parts/adaln_single.cpp). Whole blocks have no
// padding, which would count as arithmetic.
constexpr int64_t kRowsOfBlock = 32;

// Returns the input of one image, on meta.
ModelInput dry_input(const DenoiserShape& shape, int64_t height, int64_t width, int64_t text_rows) {
  const at::TensorOptions meta(at::kMeta);
  return {.x_t = at::empty({1, shape.in_channels, height, width}, meta),
          .timesteps = at::empty({1}, meta),
          .conditioning = outline_of_one(shape.conditioning, text_rows)};
}

// Runs the segments one after another, and calls after(segment's index) behind each.
template <class After>
void walk(const SegmentModel& model, const ModelInput& input, const After& after) {
  State state;
  SkipStack skips;
  for (size_t i = 0; i < model.segments().size(); ++i) {
    const Segment& segment = *model.segments()[i];
    skips.enter(state, segment.skips());
    state = segment.forward(state, input);
    skips.leave(state, segment.skips());
    after(i);
  }
}

// Returns the FLOPs of each segment. A CPU has operations that make several products at once and are priced
// by their bytes. Those of a GPU are all counted.
std::vector<double> recorded_flops(const SegmentModel& model, const ModelInput& input) {
  const DryRunScope dry_run(DryRunDevice::kCuda);
  OpRecorder recorder(/*timed=*/false);
  std::vector<double> flops(model.segments().size());
  walk(model, input, [&](size_t segment) {
    for (const OpRecord& op : recorder.take()) flops[segment] += op.flops;
  });
  return flops;
}

double sum_of(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}

// Returns the kept bytes of each segment. A CPU's fused operations show what they multiply as the segment
// hands it to them.
std::vector<double> recorded_bytes(const SegmentModel& model, const ModelInput& input, at::ScalarType held) {
  const DryRunScope dry_run(DryRunDevice::kCpu);
  OpRecorder recorder(OpRecorder::Options{.keeps_operands = true});
  std::vector<double> bytes(model.segments().size());
  std::set<const void*> seen;
  std::vector<at::Tensor> alive;  // so that no other tensor takes the place of one that was seen
  walk(model, input, [&](size_t segment) {
    for (at::Tensor& operand : recorder.take_operands()) {
      if (!operand.is_floating_point() || !seen.insert(operand.storage().unsafeGetStorageImpl()).second)
        continue;
      const auto size = static_cast<size_t>(operand.element_size());
      const size_t elements = operand.storage().nbytes() / size;
      bytes[segment] += static_cast<double>(elements * std::min(size, c10::elementSize(held)));
      alive.push_back(std::move(operand));
    }
  });
  return bytes;
}

}  // namespace

// A search of plans asks this of one model for each of its configurations.
double ForwardFlops::operator()(const ImageExtent& image) const {
  static std::mutex mutex;
  static std::map<std::tuple<std::string, int64_t, int64_t>, Line> known;
  const std::lock_guard lock(mutex);
  const std::tuple key(key_, image.height, image.width);
  auto found = known.find(key);
  if (found == known.end()) found = known.emplace(key, record(image.height, image.width)).first;
  return found->second.without_text + image.text_rows * found->second.per_row;
}

ForwardFlops::Line ForwardFlops::record(int64_t height, int64_t width) const {
  const at::NoGradGuard no_grad;
  const auto denoiser = build_denoiser(model_, config_, {.device = at::kMeta});
  const auto with_rows = [&](int64_t text_rows) {
    return sum_of(recorded_flops(*denoiser, dry_input(denoiser->shape(), height, width, text_rows)));
  };
  const double of_block = with_rows(kRowsOfBlock);
  const double more = with_rows(2 * kRowsOfBlock) - of_block;
  return {.without_text = of_block - more, .per_row = more / kRowsOfBlock};
}

std::vector<SegmentWork> forward_work(const SegmentModel& model, const ModelInput& input,
                                      at::ScalarType held) {
  const at::NoGradGuard no_grad;
  const std::vector<double> flops = recorded_flops(model, input), bytes = recorded_bytes(model, input, held);
  std::vector<SegmentWork> work;
  for (size_t i = 0; i < flops.size(); ++i)
    work.push_back({.name = model.segments()[i]->name(), .flops = flops[i], .kept_bytes = bytes[i]});
  return work;
}

std::vector<SegmentWork> forward_work(const Denoiser& denoiser, const ImageExtent& image,
                                      at::ScalarType held) {
  const auto with_rows = [&](int64_t text_rows) {
    return forward_work(denoiser, dry_input(denoiser.shape(), image.height, image.width, text_rows), held);
  };
  std::vector<SegmentWork> work = with_rows(kRowsOfBlock);
  const std::vector<SegmentWork> of_two_blocks = with_rows(2 * kRowsOfBlock);
  const double blocks = image.text_rows / kRowsOfBlock;
  for (size_t i = 0; i < work.size(); ++i) {
    work[i].flops += (blocks - 1) * (of_two_blocks[i].flops - work[i].flops);
    work[i].kept_bytes += (blocks - 1) * (of_two_blocks[i].kept_bytes - work[i].kept_bytes);
  }
  return work;
}

}  // namespace kiln
