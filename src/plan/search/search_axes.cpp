#include "plan/search/search_axes.h"

#include <algorithm>

namespace kiln {

namespace {

constexpr int64_t kMostTriedGpus = 1024;

}  // namespace

std::vector<at::ScalarType> SearchAxes::dtypes() const {
  if (is_fixed("compute-dtype")) return {search_.plan.train.compute.dtype};
  const bool has_bf16 = machine_.peak_flops.contains(at::kBFloat16);
  return {has_bf16 ? at::kBFloat16 : at::kHalf, at::kFloat};
}

std::vector<int64_t> SearchAxes::gpu_counts() const {
  if (!search_.any_gpus) return {search_.plan.gpus};
  if (!on_cuda()) return {1};
  std::vector<int64_t> counts;
  const int64_t batch = search_.plan.train.global_batch;
  const bool divides = is_fixed("zero-stage") && search_.plan.train.zero.stage > 0;
  for (int64_t gpus = divides ? 2 : 1; gpus <= std::min(batch, kMostTriedGpus); gpus *= 2)
    if (batch % gpus == 0) counts.push_back(gpus);
  return counts;
}

std::vector<int64_t> SearchAxes::micro_batches(int64_t gpus) const {
  const TrainOptions& train = search_.plan.train;
  if (is_fixed("micro-batch")) return {rows_of_walk(train, gpus)};
  const int64_t rank_batch = train.global_batch / gpus;
  std::vector<int64_t> sizes;
  for (int64_t parts = 1;; parts *= 2) {
    sizes.push_back((rank_batch + parts - 1) / parts);
    if (sizes.back() == 1) return sizes;
  }
}

std::vector<int64_t> SearchAxes::stages(int64_t gpus) const {
  if (is_fixed("zero-stage")) return {search_.plan.train.zero.stage};
  if (is_fixed("offload-params") && search_.plan.train.offload.params != Placement::kDevice) return {3};
  if (gpus > 1) return {0, 1, 2, 3};
  const bool can_offload = on_cuda() && !is_fixed("offload-params");
  return can_offload ? std::vector<int64_t>{0, 3} : std::vector<int64_t>{0};
}

std::vector<Placement> SearchAxes::optimizer_places() const {
  if (is_fixed("offload-optimizer")) return {search_.plan.train.offload.optimizer};
  if (!on_cuda()) return {Placement::kDevice};
  return {Placement::kDevice, Placement::kHost, Placement::kNvme};
}

std::vector<Placement> SearchAxes::weight_places(int64_t gpus, int64_t zero_stage) const {
  if (is_fixed("offload-params")) return {search_.plan.train.offload.params};
  if (!on_cuda() || zero_stage < 3) return {Placement::kDevice};
  if (gpus == 1 && !is_fixed("zero-stage"))
    return {Placement::kHost, Placement::kNvme};  // weights on the device are stage 0
  return {Placement::kDevice, Placement::kHost, Placement::kNvme};
}

bool SearchAxes::is_one_set() const {
  return is_fixed("recompute") || !search_.plan.train.memory.offload_activations.is_none();
}

bool SearchAxes::may_offload_activations() const {
  return on_cuda() && !is_fixed("offload-activations") && !is_one_set();
}

}  // namespace kiln
