#include "models/forward_flops.h"

#include <map>
#include <mutex>
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

// Returns the input of one image, on meta, with all that the model is told.
ModelInput dry_input(const DenoiserShape& shape, int64_t height, int64_t width, int64_t text_rows) {
  const at::TensorOptions meta(at::kMeta);
  const ConditioningShape& told = shape.conditioning;
  ModelInput input{.x_t = at::empty({1, shape.in_channels, height, width}, meta),
                   .timesteps = at::empty({1}, meta)};
  Conditioning& conditions = input.conditioning;
  if (told.takes_text())
    conditions.text = {.rows = at::empty({text_rows, told.text_width}, meta),
                       .offsets = at::empty({2}, meta.dtype(at::kInt)),
                       .host_offsets = {0, text_rows}};
  for (const SampleCondition& condition : sample_conditions())
    if (condition.is_taken(told))
      conditions.*condition.tensor = at::empty(condition.of_one, meta.dtype(condition.dtype));
  return input;
}

double recorded_flops(const Denoiser& denoiser, const ModelInput& input) {
  OpRecorder recorder(/*timed=*/false);
  denoiser.forward(input);
  double flops = 0;
  for (const OpRecord& op : recorder.take()) flops += op.flops;
  return flops;
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
  // A CPU has operations that make several products at once and are priced by their bytes. Those of a GPU
  // are all counted.
  const DryRunScope dry_run(DryRunDevice::kCuda);
  const auto denoiser = build_denoiser(model_, config_, {.device = at::kMeta});
  const auto with_rows = [&](int64_t text_rows) {
    return recorded_flops(*denoiser, dry_input(denoiser->shape(), height, width, text_rows));
  };
  const double of_block = with_rows(kRowsOfBlock);
  if (!denoiser->shape().conditioning.takes_text()) return {.without_text = of_block};
  const double more = with_rows(2 * kRowsOfBlock) - of_block;
  return {.without_text = of_block - more, .per_row = more / kRowsOfBlock};
}

}  // namespace kiln
